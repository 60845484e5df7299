"""The client: `openai.OpenAI`, and what mlserve has besides.

>>> from mlserve.client import Client, image
>>> client = Client()
>>> client.ask("What is this?", images=[image("cat.png")], adapter="pirate").text

Everything that the openai package does works as there: `client.chat.completions.create(...)`, streaming, retries
(`max_retries`), timeouts, its errors. Adapters are models: `model="pirate"`.
"""

from __future__ import annotations

from mlserve.client.aio import AsyncAnswerStream, AsyncClient
from mlserve.client.parts import embeddings, image
from mlserve.client.sync import AnswerStream, Client
from mlserve.client.types import Adapter, AdapterList, Answer, BlockRun, CacheBlocks, CacheStats, ImageMatch

__all__ = [
    "Adapter",
    "AdapterList",
    "Answer",
    "AnswerStream",
    "AsyncAnswerStream",
    "AsyncClient",
    "BlockRun",
    "CacheBlocks",
    "CacheStats",
    "Client",
    "ImageMatch",
    "embeddings",
    "image",
]

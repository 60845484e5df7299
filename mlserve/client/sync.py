"""The client that waits."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any
from urllib.parse import quote

import openai
from openai import Stream
from openai.types.chat import ChatCompletionChunk

from mlserve.client.parts import Part
from mlserve.client.types import (
    Adapter,
    AdapterList,
    Answer,
    CacheBlocks,
    CacheStats,
    Deleted,
    Status,
    StreamedAnswer,
    answer_of,
    question,
)

__all__ = ["AnswerStream", "Client", "adapter_path", "answer_arguments", "default_options"]

DEFAULT_URL = "http://127.0.0.1:8000/v1"


def default_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Address and key: as given, or from MLSERVE_URL and MLSERVE_API_KEY, or those of a local server without keys.

    The openai package's own variables aren't read: they are for another server, which must not get this one's requests.
    """
    filled = dict(options)
    if filled.get("base_url") is None:
        filled["base_url"] = os.environ.get("MLSERVE_URL") or DEFAULT_URL
    if filled.get("api_key") is None:
        filled["api_key"] = os.environ.get("MLSERVE_API_KEY") or "none"
    return filled


def answer_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a question as arguments of `chat.completions.create`: greedy, unless they say otherwise.

    Raises `ValueError` for those whose outcome an `Answer` can't hold.
    """
    for name in ("n", "tools"):
        if name in options:
            raise ValueError(f"{name} is given, and an Answer is one text: use client.chat.completions.create")
    return {"temperature": 0.0, **options}


class Client(openai.OpenAI):
    """`openai.OpenAI` for an mlserve server, with `ask`, `stream`, `adapters` and `cache`.

    Errors are the openai package's: `openai.NotFoundError` for an unknown adapter, `openai.RateLimitError`, ...
    """

    def __init__(self, **options: Any) -> None:
        """options: those of `openai.OpenAI`, such as `base_url` (with its /v1), `api_key`, `timeout`, `max_retries`."""
        super().__init__(**default_options(options))

    @property
    def adapters(self) -> Adapters:
        """The server's LoRA adapters. All but `list` and `get` need an administrator's key."""
        return Adapters(self)

    @property
    def cache(self) -> Cache:
        """The server's prefix cache."""
        return Cache(self)

    def ask(
        self,
        prompt: str,
        *,
        adapter: str | None = None,
        images: Sequence[Part] = (),
        system: str | None = None,
        history: Sequence[Mapping[str, Any]] = (),
        **options: Any,
    ) -> Answer:
        """Ask one question.

        adapter: a name, or None for the base model. images: parts made by `image` or `embeddings`. history: earlier
        messages. options: more of `chat.completions.create`, such as `max_tokens` and `extra_body`; temperature is 0
        unless it is given, and `n` and `tools` can't be.
        """
        arguments = answer_arguments(options)
        messages = question(prompt, images, system, history)
        model = self.base_model if adapter is None else adapter
        return answer_of(self.chat.completions.create(model=model, messages=messages, stream=False, **arguments))

    def stream(
        self,
        prompt: str,
        *,
        adapter: str | None = None,
        images: Sequence[Part] = (),
        system: str | None = None,
        history: Sequence[Mapping[str, Any]] = (),
        **options: Any,
    ) -> AnswerStream:
        """As `ask`, piece by piece: iterate over the texts, then look at `.answer`."""
        arguments = answer_arguments(options)
        messages = question(prompt, images, system, history)
        model = self.base_model if adapter is None else adapter
        started = time.monotonic()
        chunks = self.chat.completions.create(
            model=model, messages=messages, stream=True, stream_options={"include_usage": True}, **arguments
        )
        return AnswerStream(chunks, started)

    @cached_property
    def base_model(self) -> str:
        """What the server calls its base model; asked for once."""
        return self.models.list().data[0].id


class AnswerStream:
    """An answer as it comes. Use as a context manager, or read it to its end; closing it stops the answer."""

    def __init__(self, chunks: Stream[ChatCompletionChunk], started: float) -> None:
        self._chunks = chunks
        self._whole = StreamedAnswer(started)

    def __enter__(self) -> AnswerStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[str]:
        for chunk in self._chunks:
            text = self._whole.add(chunk, time.monotonic())
            if text:
                yield text

    @property
    def answer(self) -> Answer:
        """What has come so far; all of it once it was read to its end."""
        return self._whole.answer()

    def close(self) -> None:
        """Stop the answer: the server frees what it held."""
        self._chunks.close()


class Adapters:
    """LoRA adapters over HTTP."""

    def __init__(self, client: openai.OpenAI) -> None:
        self._client = client

    def list(self) -> AdapterList:
        """Those that were loaded or asked for, and all names that can be asked for."""
        return self._client.get("/adapters", cast_to=AdapterList)

    def get(self, name: str) -> Adapter:
        """One that was loaded or asked for."""
        return self._client.get(adapter_path(name), cast_to=Adapter)

    def load(self, name: str, path: str | None = None, *, pinned: bool = False) -> Adapter:
        """Serve a folder on the server under a name. Without a path the name's own folder is read again."""
        return self._client.put(adapter_path(name), body={"path": path, "pinned": pinned}, cast_to=Adapter)

    def unload(self, name: str) -> Deleted:
        """Serve a name no longer; requests that run finish."""
        return self._client.delete(adapter_path(name), cast_to=Deleted)


class Cache:
    """The prefix cache over HTTP. Where keys are needed, it takes an administrator's."""

    def __init__(self, client: openai.OpenAI) -> None:
        self._client = client

    def stats(self) -> CacheStats:
        """Its figures."""
        return self._client.get("/cache", cast_to=CacheStats)

    def blocks(self) -> CacheBlocks:
        """A map of all blocks."""
        return self._client.get("/cache/blocks", cast_to=CacheBlocks)

    def reset(self) -> Status:
        """Forget all cached KV. Takes an administrator's key in any case."""
        return self._client.post("/cache/reset", cast_to=Status)


def adapter_path(name: str) -> str:
    """Where an adapter of any name is. Raises `ValueError` for an empty one: that is where their list is."""
    if not name:
        raise ValueError("the adapter's name is empty: give one")
    # Dots stand for themselves in a URL, but as a whole segment they would mean a folder.
    segment = name.replace(".", "%2E") if name in (".", "..") else quote(name, safe="")
    return f"/adapters/{segment}"

"""Chats over HTTP, with the openai package as the client."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from engines import make_engine
from fakes import ContextRunner
from http_server import MODEL, Served, served

from mlserve.engine.tokenizer import Tokenizer

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Served]:
    engine = make_engine(ContextRunner(128, 4), tokenizer, num_blocks=512, vocab_size=tokenizer.vocab_size)
    with served(engine) as server:
        yield server


def test_an_answer_streamed_is_the_answer_in_one_piece(server: Served) -> None:
    client = server.client()
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=9, temperature=0)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=9,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 9


def test_the_models_are_the_base_and_its_adapters(server: Served) -> None:
    assert [model.id for model in server.client().models.list()] == [MODEL]
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        server.client().chat.completions.create(model="other", messages=HELLO)


def test_a_client_that_leaves_frees_everything(server: Served) -> None:
    stream = server.client().chat.completions.create(model=MODEL, messages=HELLO, max_tokens=400, stream=True)
    next(iter(stream))
    stream.close()
    server.wait_until_idle()

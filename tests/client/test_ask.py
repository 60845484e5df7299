"""Questions through the client: whole, piece by piece, and stopped."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from engines import make_engine
from http_server import MODEL, Served, served
from streaming import SlowRunner

from mlserve.client import Answer, AsyncClient, Client
from mlserve.client.aio import AsyncAdapters, AsyncCache
from mlserve.client.sync import Adapters, Cache
from mlserve.engine.tokenizer import Tokenizer

HISTORY = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Served]:
    engine = make_engine(SlowRunner(128, 4), tokenizer, num_blocks=512, vocab_size=tokenizer.vocab_size)
    with served(engine) as server:
        yield server


@pytest.fixture
def client(server: Served) -> Iterator[Client]:
    with Client(base_url=f"{server.url}/v1", timeout=30, max_retries=0) as client:
        yield client


def new_async(server: Served) -> AsyncClient:
    return AsyncClient(base_url=f"{server.url}/v1", timeout=30, max_retries=0)


def test_ask_is_a_greedy_chat(client: Client) -> None:
    answer = client.ask("three", system="zero", history=HISTORY, max_tokens=9)
    messages: list[Any] = [{"role": "system", "content": "zero"}, *HISTORY, {"role": "user", "content": "three"}]
    chat = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=9, temperature=0)
    assert answer.text == chat.choices[0].message.content != ""
    assert (answer.finish_reason, answer.model, answer.completion_tokens) == ("length", MODEL, 9)
    assert answer.prompt_tokens == chat.usage.prompt_tokens
    assert answer.images == []
    assert answer.time_to_first_token is None


def test_ask_tells_what_was_cached(client: Client) -> None:
    first, second = (client.ask("never asked before", max_tokens=2) for _ in range(2))
    assert first.cached_tokens < 8
    assert second.cached_tokens >= first.prompt_tokens // 4 * 4 - 4


def test_stream_gives_the_texts_of_ask(client: Client) -> None:
    whole = client.ask("hello", max_tokens=9)
    with client.stream("hello", max_tokens=9) as stream:
        texts = list(stream)
    assert len(texts) > 1
    assert "".join(texts) == whole.text
    assert_same(stream.answer, whole)


def assert_same(streamed: Answer, whole: Answer) -> None:
    for name in ("text", "finish_reason", "model", "prompt_tokens", "completion_tokens", "images"):
        assert getattr(streamed, name) == getattr(whole, name)
    assert streamed.time_to_first_token is not None
    assert 0 < streamed.time_to_first_token < 30


def test_async_ask_and_stream(server: Served, client: Client) -> None:
    async def main() -> tuple[Answer, list[str], Answer]:
        async with new_async(server) as client:
            whole = await client.ask("three", system="zero", history=HISTORY, max_tokens=9)
            async with await client.stream("three", system="zero", history=HISTORY, max_tokens=9) as stream:
                texts = [text async for text in stream]
            return whole, texts, stream.answer

    whole, texts, streamed = asyncio.run(main())
    assert whole.text == client.ask("three", system="zero", history=HISTORY, max_tokens=9).text
    assert "".join(texts) == whole.text
    assert_same(streamed, whole)


def steps(server: Served) -> int:
    """How many the model has run. An answer of 400 tokens takes as many."""
    return len(server.engine.runner.steps)


def test_closing_a_stream_frees_what_it_held(server: Served, client: Client) -> None:
    before = steps(server)
    with client.stream("hello", max_tokens=400) as stream:
        first = next(iter(stream))
    assert stream.answer.text == first
    assert stream.answer.finish_reason == ""
    server.wait_until_idle()
    assert steps(server) - before < 300


def test_closing_an_async_stream_frees_what_it_held(server: Served) -> None:
    async def main() -> None:
        async with new_async(server) as client:
            async with await client.stream("hello", max_tokens=400) as stream:
                first = await anext(aiter(stream))
            assert stream.answer.text == first
            await asyncio.to_thread(server.wait_until_idle)  # while the client is still there

    before = steps(server)
    asyncio.run(main())
    assert steps(server) - before < 300


def test_an_answer_that_was_not_read(server: Served, client: Client) -> None:
    with client.stream("hello", max_tokens=400) as stream, pytest.raises(ValueError, match="iterate over it first"):
        _ = stream.answer
    server.wait_until_idle()


def test_time_to_first_token_is_that_of_the_question_alone(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking what the base model is called, once, doesn't count."""
    clock = SimpleNamespace(now=100.0)
    list_models = client.models.list

    def list_slowly() -> Any:
        clock.now += 50
        return list_models()

    monkeypatch.setattr(client.models, "list", list_slowly)
    monkeypatch.setattr("mlserve.client.sync.time", SimpleNamespace(monotonic=lambda: clock.now))
    with client.stream("hello", max_tokens=2) as stream:
        clock.now += 1
        list(stream)
    assert clock.now == 151
    assert stream.answer.time_to_first_token == 1


def test_options_of_an_answer_that_cannot_be(client: Client) -> None:
    for options in ({"n": 2}, {"tools": []}):
        with pytest.raises(ValueError, match=r"use client\.chat\.completions\.create"):
            client.ask("hello", **options)
        with pytest.raises(ValueError, match=r"use client\.chat\.completions\.create"):
            client.stream("hello", **options)
    for options in ({"stream": True}, {"model": MODEL}, {"messages": []}):
        with pytest.raises(TypeError, match=f"{next(iter(options))}"):
            client.ask("hello", **options)
    with pytest.raises(TypeError, match="stream_options"):
        client.stream("hello", stream_options={})


def test_an_adapter_that_is_not_there(client: Client) -> None:
    """An empty name is a name: it doesn't stand for the base model."""
    for name in ("nobody", ""):
        with pytest.raises(openai.NotFoundError, match=f"there is no model '{name}' here"):
            client.ask("hello", adapter=name)
        with pytest.raises(openai.NotFoundError, match=f"there is no model '{name}' here"):
            client.stream("hello", adapter=name)


def test_the_base_model_is_asked_for_once(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    assert client.base_model == MODEL
    monkeypatch.setattr(client.models, "list", None)
    assert client.ask("hello", max_tokens=1).model == MODEL


def test_the_plain_openai_client(server: Served, client: Client) -> None:
    plain = server.client()
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    chat = plain.chat.completions.create(model=MODEL, messages=messages, max_tokens=9, temperature=0)
    assert chat.choices[0].message.content == client.ask("hello", max_tokens=9).text
    completion = plain.completions.create(model=MODEL, prompt="hello", max_tokens=5, temperature=0)
    assert completion.usage.completion_tokens == 5
    assert plain.models.retrieve(MODEL).id == MODEL


@pytest.mark.parametrize(
    ("waiting", "async_"),
    [(Client, AsyncClient), (Adapters, AsyncAdapters), (Cache, AsyncCache)],
    ids=lambda c: c.__name__,
)
def test_both_clients_have_the_same_methods(waiting: type, async_: type) -> None:
    def methods(cls: type) -> dict[str, list[tuple[str, Any, Any]]]:
        own = {
            name: value
            for base in cls.__mro__
            if base.__module__.startswith("mlserve")
            for name, value in vars(base).items()
            if not name.startswith("_")
        }
        return {
            name: [(p.name, p.kind, p.default) for p in inspect.signature(value).parameters.values()]
            for name, value in own.items()
            if inspect.isfunction(value)
        }

    plain, other = methods(waiting), methods(async_)
    if waiting is Client:  # it is a property there: a coroutine can't be one
        assert other.pop("base_model") == [("self", inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty)]
        assert {"adapters", "cache", "base_model"} <= set(dir(Client)) & set(dir(AsyncClient))
    assert plain == other
    assert len(plain) >= 2
    assert all(inspect.iscoroutinefunction(getattr(async_, name)) for name in other)

"""The client for coroutines; what it does is said in `sync`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import openai
from openai import AsyncStream
from openai.types.chat import ChatCompletionChunk

from mlserve.client.parts import Part
from mlserve.client.sync import adapter_path, answer_arguments, default_options
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

__all__ = ["AsyncAnswerStream", "AsyncClient"]


class AsyncClient(openai.AsyncOpenAI):
    """`openai.AsyncOpenAI` for an mlserve server, with `ask`, `stream`, `adapters` and `cache`, as in `Client`."""

    def __init__(self, **options: Any) -> None:
        """options: those of `openai.AsyncOpenAI`."""
        super().__init__(**default_options(options))
        self._base_model: str | None = None

    @property
    def adapters(self) -> AsyncAdapters:
        """The server's LoRA adapters."""
        return AsyncAdapters(self)

    @property
    def cache(self) -> AsyncCache:
        """The server's prefix cache."""
        return AsyncCache(self)

    async def ask(
        self,
        prompt: str,
        *,
        adapter: str | None = None,
        images: Sequence[Part] = (),
        system: str | None = None,
        history: Sequence[Mapping[str, Any]] = (),
        **options: Any,
    ) -> Answer:
        """Ask one question, as `Client.ask`."""
        arguments = answer_arguments(options)
        messages = question(prompt, images, system, history)
        model = await self.base_model() if adapter is None else adapter
        return answer_of(await self.chat.completions.create(model=model, messages=messages, stream=False, **arguments))

    async def stream(
        self,
        prompt: str,
        *,
        adapter: str | None = None,
        images: Sequence[Part] = (),
        system: str | None = None,
        history: Sequence[Mapping[str, Any]] = (),
        **options: Any,
    ) -> AsyncAnswerStream:
        """As `ask`, piece by piece, as `Client.stream`."""
        arguments = answer_arguments(options)
        messages = question(prompt, images, system, history)
        model = await self.base_model() if adapter is None else adapter
        started = time.monotonic()
        chunks = await self.chat.completions.create(
            model=model, messages=messages, stream=True, stream_options={"include_usage": True}, **arguments
        )
        return AsyncAnswerStream(chunks, started)

    async def base_model(self) -> str:
        """What the server calls its base model; asked for once."""
        if self._base_model is None:
            self._base_model = (await self.models.list()).data[0].id
        return self._base_model


class AsyncAnswerStream:
    """An answer as it comes, as `AnswerStream`."""

    def __init__(self, chunks: AsyncStream[ChatCompletionChunk], started: float) -> None:
        self._chunks = chunks
        self._whole = StreamedAnswer(started)

    async def __aenter__(self) -> AsyncAnswerStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def __aiter__(self) -> AsyncIterator[str]:
        async for chunk in self._chunks:
            text = self._whole.add(chunk, time.monotonic())
            if text:
                yield text

    @property
    def answer(self) -> Answer:
        """What has come so far."""
        return self._whole.answer()

    async def close(self) -> None:
        """Stop the answer."""
        await self._chunks.close()


class AsyncAdapters:
    """LoRA adapters over HTTP, as `Adapters`."""

    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self._client = client

    async def list(self) -> AdapterList:
        """Those that were loaded or asked for, and all names that can be asked for."""
        return await self._client.get("/adapters", cast_to=AdapterList)

    async def get(self, name: str) -> Adapter:
        """One that was loaded or asked for."""
        return await self._client.get(adapter_path(name), cast_to=Adapter)

    async def load(self, name: str, path: str | None = None, *, pinned: bool = False) -> Adapter:
        """Serve a folder on the server under a name, or read the name's own folder again."""
        return await self._client.put(adapter_path(name), body={"path": path, "pinned": pinned}, cast_to=Adapter)

    async def unload(self, name: str) -> Deleted:
        """Serve a name no longer."""
        return await self._client.delete(adapter_path(name), cast_to=Deleted)


class AsyncCache:
    """The prefix cache over HTTP, as `Cache`."""

    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self._client = client

    async def stats(self) -> CacheStats:
        """Its figures."""
        return await self._client.get("/cache", cast_to=CacheStats)

    async def blocks(self) -> CacheBlocks:
        """A map of all blocks."""
        return await self._client.get("/cache/blocks", cast_to=CacheBlocks)

    async def reset(self) -> Status:
        """Forget all cached KV."""
        return await self._client.post("/cache/reset", cast_to=Status)

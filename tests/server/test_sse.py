"""Event streams by themselves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack

import pytest
from starlette.types import Message

from mlserve.server import sse
from mlserve.server.errors import ApiError
from mlserve.server.sse import EventStream, event

SCOPE = {"type": "http", "asgi": {"spec_version": "2.3"}}


async def never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def sent(events: AsyncGenerator[bytes], timeout: float = 60) -> list[Message]:
    """What a stream sends to a client that reads; `left` is said when what it held is left."""
    messages: list[Message] = []
    held = AsyncExitStack()
    held.callback(messages.append, {"type": "left"})

    async def send(message: Message) -> None:
        messages.append(message)

    await EventStream(events, held, timeout)(SCOPE, never, send)
    return messages


async def some(*items: str, error: Exception | None = None) -> AsyncGenerator[bytes]:
    for item in items:
        yield event({"text": item})
    if error is not None:
        raise error


def bodies(messages: list[Message]) -> list[bytes]:
    return [message["body"] for message in messages if message["type"] == "http.response.body"]


def test_events_end_with_done() -> None:
    messages = asyncio.run(sent(some("é\n\nx", "data: [DONE]")))
    assert bodies(messages) == [
        'data: {"text":"é\\n\\nx"}\n\n'.encode(), b'data: {"text":"data: [DONE]"}\n\n', b"data: [DONE]\n\n", b"",
    ]  # fmt: skip
    assert messages[-1] == {"type": "left"}


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ApiError(400, "no"), "invalid_request_error", "no"),
        (TimeoutError(), "timeout", "too long"),
        (KeyError("secret"), "server_error", "the server failed"),
    ],
)
def test_an_error_is_the_last_event(error: Exception, kind: str, message: str) -> None:
    last = bodies(asyncio.run(sent(some("a", error=error))))[1]
    shown = json.loads(last.removeprefix(b"data: "))["error"]
    assert shown["type"] == kind
    assert message in shown["message"]
    assert "secret" not in shown["message"]


def test_who_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "SENDING", 0.05)
    left: list[str] = []

    async def main() -> None:
        held = AsyncExitStack()
        held.callback(left.append, "held")
        events = some("a", "b")

        async def send(message: Message) -> None:
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        async with asyncio.timeout(5):
            await EventStream(events, held, 0.05)(SCOPE, never, send)
        with pytest.raises(StopAsyncIteration):
            await anext(events)

    asyncio.run(main())
    assert left == ["held"]


def test_who_goes_closes_where_events_come_from() -> None:
    closed: list[str] = []

    async def endless() -> AsyncGenerator[bytes]:
        try:
            while True:
                yield event({})
                await asyncio.sleep(0)
        finally:
            closed.append("events")

    async def main() -> None:
        gone = asyncio.Event()

        async def receive() -> Message:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.body":
                gone.set()

        held = AsyncExitStack()
        held.callback(closed.append, "held")
        await EventStream(endless(), held, 60)(SCOPE, receive, send)

    asyncio.run(main())
    assert closed == ["events", "held"]

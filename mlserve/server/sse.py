"""Server-sent events, as OpenAI's API streams them: one JSON object each, then `[DONE]`; an error is an event too."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from mlserve.server.errors import api_error

__all__ = ["EventStream", "event"]

DONE = b"data: [DONE]\n\n"


def event(body: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class EventStream(StreamingResponse):
    """Sends events until there are no more, or the client goes. Then, however it ended, closes where they come from."""

    def __init__(self, events: AsyncGenerator[bytes], held: AsyncExitStack) -> None:
        """`held` is left when the stream has ended: the place in the gate, and where the outputs come from."""
        self._events = events
        self._held = held
        super().__init__(
            _with_end(events),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held, aclosing(self._events):
            await super().__call__(scope, receive, send)


async def _with_end(events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    try:
        async for each in events:
            yield each
    except Exception as error:
        yield event(api_error(error).body)
        return
    yield DONE

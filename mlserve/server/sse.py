"""Server-sent events, as OpenAI's API streams them: a JSON object each, and an error is an event too."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import AsyncExitStack, aclosing
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from mlserve.server.errors import ApiError, api_error

__all__ = ["EventStream", "event"]

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
SENDING = 10.0  # seconds that a client may lag behind what there is to read


def event(body: dict[str, Any], name: str | None = None) -> bytes:
    """One event; some of OpenAI's have names."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _error_event(error: ApiError) -> Iterable[bytes]:
    yield event(error.body)


class EventStream(StreamingResponse):
    """Sends events until there are no more, or the client goes. Then, however it ended, closes where they come from."""

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        held: AsyncExitStack,
        timeout: float,
        *,
        end: bytes = DONE,
        on_error: Callable[[ApiError], Iterable[bytes]] = _error_event,
    ) -> None:
        """`held` is left when the stream has ended: the place in the gate, and where the outputs come from.

        timeout: seconds within which all events will have come; a client that doesn't read them is cut off after that.
        end: what follows the last event. on_error: what tells of an error, in place of what would have followed.
        """
        self._events = events
        self._held = held
        self._timeout = timeout + SENDING
        super().__init__(
            _with_end(events, end, on_error),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held, aclosing(self._events):
            try:
                async with asyncio.timeout(self._timeout):
                    await super().__call__(scope, receive, send)
            except TimeoutError:
                logger.warning("a client didn't read its stream within %.0f s and was cut off", self._timeout)


async def _with_end(
    events: AsyncGenerator[bytes], end: bytes, on_error: Callable[[ApiError], Iterable[bytes]]
) -> AsyncGenerator[bytes]:
    try:
        async for each in events:
            yield each
    except Exception as error:
        for each in on_error(api_error(error)):
            yield each
        return
    if end:
        yield end

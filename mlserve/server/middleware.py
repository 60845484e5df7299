"""What every request passes before it reaches a route: its id, its key, the size of its body; and the log of it.

Plain ASGI, since wrappers that read responses hide from a route that its client has gone.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Mapping
from types import MappingProxyType

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlserve.server.auth import ANYONE, KeyRing, Principal
from mlserve.server.errors import ApiError, api_error
from mlserve.server.routes import page

__all__ = ["OPEN_PATHS", "Guard"]

access_log = logging.getLogger("mlserve.server.access")

# Answered without a key: they tell nothing but that the server is there, and hold the page that asks for a key.
OPEN_PATHS = frozenset({"/health", "/ready"}) | page.PATHS
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
SECURITY_HEADERS: Mapping[str, str] = MappingProxyType(
    {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
)


class Guard:
    """Lets only those in who may, for every path but `OPEN_PATHS`, whether there is a route or not."""

    def __init__(self, app: ASGIApp, keys: KeyRing, max_body_bytes: int) -> None:
        self.app = app
        self._keys = keys
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return  # no web sockets
        started = time.monotonic()
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        principal = self._keys.find(headers.get("authorization", ""))
        scope.setdefault("state", {}).update(request_id=request_id, principal=principal or ANYONE)
        status, has_begun = 500, False

        async def send_with_id(message: Message) -> None:
            nonlocal status, has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                status = message["status"]
                MutableHeaders(scope=message).update({"X-Request-Id": request_id, **SECURITY_HEADERS})
            await send(message)

        try:
            refusal = self._refusal(scope, headers, principal)
            if refusal is not None:
                await refusal.response()(scope, receive, send_with_id)
            else:
                await self.app(scope, _Bounded(receive, self._max_body_bytes), send_with_id)
        except Exception as error:
            if has_begun:
                raise
            await api_error(error).response()(scope, receive, send_with_id)
        finally:
            access_log.info(
                "%s %s",
                scope["method"],
                scope["path"],
                extra={
                    "request_id": request_id,
                    "tenant": None if principal is None else principal.tenant,
                    "user": scope["state"].get("user"),  # as the body names it
                    "status": status,
                    "seconds": round(time.monotonic() - started, 4),
                },
            )

    def _refusal(self, scope: Scope, headers: Headers, principal: Principal | None) -> ApiError | None:
        if principal is None and scope["path"] not in OPEN_PATHS:
            return ApiError(
                401,
                "the API key is missing or wrong: send it as 'Authorization: Bearer <key>'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_body_bytes:
            return _too_large(self._max_body_bytes)
        return None


class _Bounded:
    """A body of unstated length may not be longer either."""

    def __init__(self, receive: Receive, max_bytes: int) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._num_bytes = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._num_bytes += len(message.get("body", b""))
            if self._num_bytes > self._max_bytes:
                error = _too_large(self._max_bytes)
                raise HTTPException(error.status, str(error))  # FastAPI makes 400 of all others
        return message


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body has more than {max_bytes} bytes: send less or raise max_body_bytes")

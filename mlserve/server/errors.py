"""Errors as clients of OpenAI's API know them: a status, and `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from mlserve.errors import (
    AdapterError,
    AdapterFileNotFoundError,
    AdapterNotFoundError,
    ConfigError,
    MlserveError,
    RequestError,
    StepError,
)

__all__ = ["ApiError", "ClientGoneError", "add_error_handlers", "api_error"]

logger = logging.getLogger(__name__)

CLIENT_GONE = 499  # as nginx logs it; nobody reads the answer
MAX_SHOWN = 500  # characters of a message that may repeat what came


class ApiError(MlserveError):
    """An error with all that its response says."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message.encode(errors="backslashreplace").decode())  # it may repeat what no body can hold
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """What goes over the wire."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The whole response."""
        return JSONResponse(self.body, self.status, self.headers)


class ClientGoneError(ApiError):
    """The client closed the connection before it had its answer."""

    def __init__(self) -> None:
        super().__init__(CLIENT_GONE, "the client closed the connection")


def api_error(error: BaseException) -> ApiError:
    """Any error as one with a status. What isn't ours says nothing of itself to clients: it is logged."""
    match error:
        case ApiError():
            return error
        case AdapterNotFoundError():
            return ApiError(404, str(error), param="model", code="model_not_found")
        case AdapterFileNotFoundError():
            return ApiError(404, str(error), code="adapter_not_found")
        case RequestError() | AdapterError() | ConfigError():
            return ApiError(400, str(error))
        case StepError():
            return ApiError(500, str(error), kind="server_error")
        case TimeoutError():
            return ApiError(504, "the request took too long: ask for less, or raise request_timeout", kind="timeout")
        case MlserveError():
            return ApiError(503, str(error), kind="server_error")
        case _:
            logger.error("a request failed in an unforeseen way", exc_info=error)
            return ApiError(500, "the server failed: its log says more", kind="server_error")


def add_error_handlers(app: FastAPI) -> None:
    """Have the errors of an application's routes answered in this form; those unforeseen are left to `Guard`."""

    async def known(_: Request, error: Exception) -> JSONResponse:
        return api_error(error).response()

    async def invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return _invalid_body(error).response()

    async def routing(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return ApiError(error.status_code, str(error.detail), headers=error.headers).response()

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, routing)
    app.add_exception_handler(MlserveError, known)


def _invalid_body(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body. Of a union the branch of the right type says it best, then the one
    that came furthest."""
    first = max(error.errors(), key=lambda found: (not found["type"].endswith("_type"), len(found["loc"])))
    place = [str(part) for part in first["loc"] if part != "body"]
    param = place[0] if place and not place[0].isdigit() else None
    message = first["msg"] if param is None else f"{param}: {first['msg']}"
    return ApiError(400, message[:MAX_SHOWN], param=param)

"""What the routes work with, made once and never changed."""

from __future__ import annotations

import logging
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request

from mlserve.adapters.registry import AdapterRegistry
from mlserve.config import ServerConfig
from mlserve.engine.admission import Limits
from mlserve.engine.async_engine import AsyncEngine
from mlserve.engine.constraints import ConstraintCompiler
from mlserve.engine.engine import Engine
from mlserve.engine.media import ImageDesk
from mlserve.engine.tokenizer import Tokenizer
from mlserve.errors import AdapterNotFoundError, PromptError
from mlserve.request import RequestOptions
from mlserve.server.auth import KeyRing, Principal
from mlserve.server.errors import ApiError
from mlserve.server.gate import Gate
from mlserve.server.metrics import Metrics
from mlserve.server.tenants import tenant_salt
from mlserve.server.tools.formats import ToolFormat, format_named
from mlserve.server.tools.templates import detect_format

__all__ = ["AdminDep", "ObserverDep", "PrincipalDep", "RequestIdDep", "Serving", "ServingDep"]

logger = logging.getLogger(__name__)

MAX_FETCHING = 32  # requests that fetch images at once


@dataclass(frozen=True, slots=True, eq=False)
class Serving:
    """An engine in its thread, those of its parts that any thread may use, and the server's own."""

    engine: AsyncEngine
    tokenizer: Tokenizer
    adapters: AdapterRegistry
    images: ImageDesk | None
    constraints: ConstraintCompiler
    limits: Limits
    config: ServerConfig
    model_name: str  # what requests call the base model
    tool_format: ToolFormat | None  # how the model writes calls of tools; None: it isn't known
    keys: KeyRing
    gate: Gate
    metrics: Metrics
    fetchers: ThreadPoolExecutor  # for requests that fetch images
    adapter_roots: tuple[Path, ...]  # that adapters may be loaded from over HTTP
    created: int  # Unix seconds

    @classmethod
    def over(
        cls, inner: Engine, engine: AsyncEngine, config: ServerConfig, model_name: str, adapter_dir: str | None = None
    ) -> Serving:
        """`engine` runs `inner`. Raises `ConfigError` for a file of keys that can't be read, and unknown formats."""
        roots = config.adapter_roots.split(",") if config.adapter_roots else [adapter_dir] if adapter_dir else []
        return cls(
            engine,
            inner.tokenizer,
            inner.adapters,
            inner.images,
            inner.constraints,
            inner.limits,
            config,
            config.served_model_name or model_name,
            _tool_format(config.tool_call_format, inner.tokenizer.chat_template),
            KeyRing(None) if config.api_keys is None else KeyRing.read(config.api_keys),
            Gate(config.max_requests),
            Metrics(),
            ThreadPoolExecutor(MAX_FETCHING, "mlserve-fetch"),
            tuple(Path(root.strip()).resolve() for root in roots),
            int(time.time()),
        )

    def adapter_of(self, model: str | None) -> str | None:
        """The adapter that a request's `model` means, None for the base model. Raises `AdapterNotFoundError`."""
        if model is None or model == self.model_name:
            return None
        try:
            self.adapters.require(model)
        except AdapterNotFoundError as error:
            raise AdapterNotFoundError(f"there is no model {model[:256]!r} here ({error})") from None
        return model

    def options(
        self, principal: Principal, model: str | None, salt: str | None, priority: int | None
    ) -> RequestOptions:
        """What a request of that principal is, besides its prompt and its sampling."""
        return RequestOptions(
            adapter=self.adapter_of(model),
            priority=priority or 0,
            cache_salt=tenant_salt(principal, salt),
            tenant=principal.tenant,
        )


def _tool_format(name: str | None, chat_template: str | None) -> ToolFormat | None:
    """What was asked for, or what the template shows. One that can't be read is logged here, and fails all chats."""
    if name is not None:
        return format_named(name)
    try:
        return detect_format(chat_template)
    except PromptError as error:
        logger.error("%s", error)
        return None


def _serving(request: Request) -> Serving:
    serving: Serving = request.app.state.serving
    return serving


def _principal(request: Request) -> Principal:
    principal: Principal = request.state.principal
    return principal


def _admin(request: Request) -> Principal:
    principal = _principal(request)
    if principal.is_admin:
        return principal
    raise ApiError(
        403,
        "this needs an administrator's API key: make one with `mlserve keys --admin`, and start with --api-keys",
        code="forbidden",
    )


def _observer(request: Request) -> Principal:
    principal = _principal(request)
    if _serving(request).keys.is_open or principal.is_admin:
        return principal
    raise ApiError(403, "this shows what all tenants do: use an administrator's API key", code="forbidden")


def _request_id(request: Request) -> str:
    """An id that no other request has; that of the log alone may be the client's, who may send it twice."""
    return f"{request.state.request_id}-{secrets.token_hex(8)}"


ServingDep = Annotated[Serving, Depends(_serving)]
PrincipalDep = Annotated[Principal, Depends(_principal)]
AdminDep = Annotated[Principal, Depends(_admin)]
ObserverDep = Annotated[Principal, Depends(_observer)]  # administrators; everybody, if no keys are needed
RequestIdDep = Annotated[str, Depends(_request_id)]

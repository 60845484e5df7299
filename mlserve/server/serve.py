"""Runs the server until it is told to stop."""

from __future__ import annotations

import gc
import json
import logging
import math
import shlex
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from mlserve.config import EngineConfig, ServerConfig
from mlserve.engine.async_engine import AsyncEngine
from mlserve.engine.build import build_engine
from mlserve.server.app import create_app
from mlserve.server.logs import configure_logging
from mlserve.server.serving import Serving

__all__ = ["serve"]

logger = logging.getLogger(__name__)


def serve(config: EngineConfig, server: ServerConfig, adapters: Mapping[str, str | Path]) -> None:
    """Load a model and adapters, and answer requests. On SIGTERM or SIGINT no more are taken; those that run have
    `drain_timeout` seconds to end.

    Raises `ModelError`, `AdapterError` or `ConfigError` before it listens.
    """
    configure_logging()
    inner = build_engine(config)
    for name, path in adapters.items():
        inner.adapters.load(name, path)
    with AsyncEngine(inner) as engine:
        serving = Serving.over(inner, engine, server, config.model.model, config.adapters.adapter_dir)
        _warn_if_exposed(server)
        options = uvicorn.Config(
            create_app(serving),
            host=server.host,
            port=server.port,
            log_config=None,
            access_log=False,
            server_header=False,
            ws="none",
            timeout_graceful_shutdown=math.ceil(server.drain_timeout),
        )
        gc.collect()
        gc.freeze()  # what is there now stays; to look through it made reading a body of long lists six times as slow
        with _sigterm_is_no_failure():
            _Server(options, serving).run()
    inner.adapters.close()


@contextmanager
def _sigterm_is_no_failure() -> Iterator[None]:
    """Once it has drained, uvicorn raises the signal that ended it again, for whoever handled it before."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Server(uvicorn.Server):
    """Says where it listens and how to ask, once it does."""

    def __init__(self, config: uvicorn.Config, serving: Serving) -> None:
        super().__init__(config)
        self._serving = serving

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            print(greeting(f"http://{shown}:{port}", self._serving), flush=True)


def greeting(address: str, serving: Serving) -> str:
    """The address, and one line to try it with."""
    question = {"role": "user", "content": "What is the capital of France?"}
    body = json.dumps({"model": serving.model_name, "messages": [question], "temperature": 0})
    key = "" if serving.keys.is_open else ' -H "Authorization: Bearer $MLSERVE_API_KEY"'
    curl = f"curl {address}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"
    models = ", ".join([serving.model_name, *serving.adapters.names()[:16]])
    return f"mlserve listens at {address} (chat page: {address}/)\nmodels: {models}\n{curl}"


def _warn_if_exposed(server: ServerConfig) -> None:
    if server.api_keys is None and server.host not in ("127.0.0.1", "localhost", "::1"):
        logger.warning(
            "the server listens on %s and needs no key: anybody who reaches it may use it; set --api-keys", server.host
        )

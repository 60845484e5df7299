"""The real server in a thread of its own, over any engine."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import uvicorn
from waiting import wait_until

from mlserve.config import ServerConfig
from mlserve.engine.async_engine import AsyncEngine
from mlserve.engine.engine import Engine
from mlserve.server.app import create_app
from mlserve.server.serving import Serving

MODEL = "tiny"


@dataclass(frozen=True)
class Served:
    """A server that listens."""

    url: str
    serving: Serving
    engine: Engine  # to look at while nothing runs
    opened: ExitStack  # what is closed with the server

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        # To read the system's certificates, which nothing here needs, takes a quarter of a second each time.
        http_client = openai.DefaultHttpxClient(verify=False)
        options = {"max_retries": 0, "timeout": 30, "http_client": http_client, **options}
        return self.opened.enter_context(openai.OpenAI(api_key=key, base_url=f"{self.url}/v1", **options))

    def http(self, **options: Any) -> httpx.Client:
        """For what the openai package can't send."""
        return self.opened.enter_context(httpx.Client(base_url=self.url, **{"timeout": 30, "verify": False, **options}))

    def wait_until_idle(self, seconds: float = 5.0) -> None:
        """Until no request is in the server and no block is referenced."""
        wait_until(
            lambda: (
                self.serving.gate.num_requests == 0
                and not self.engine.has_work()
                and self.engine.cache.stats().num_referenced == 0  # given back a moment after the work ended
            ),
            seconds,
        )

    def leave_unanswered(self, path: str, body: dict[str, Any], **headers: str) -> None:
        """Send a request, and close the connection once the model computes for it, before any of its answer came."""
        address = httpx.URL(self.url)
        connection = http.client.HTTPConnection(address.host, address.port, timeout=5)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **headers})
        wait_until(lambda: bool(self.engine.scheduler.running), 5)
        connection.close()


@contextmanager
def served(engine: Engine, adapter_dir: str | None = None, **config: Any) -> Iterator[Served]:
    """Serve an engine; at the end its pool must be whole and idle."""
    with AsyncEngine(engine) as running:
        serving = Serving.over(engine, running, ServerConfig(**config), MODEL, adapter_dir)
        options = uvicorn.Config(create_app(serving), port=0, log_config=None, access_log=False, ws="none")
        server = uvicorn.Server(options)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            wait_until(lambda: server.started, 10)
            port = server.servers[0].sockets[0].getsockname()[1]
            with ExitStack() as opened:
                yield Served(f"http://127.0.0.1:{port}", serving, engine, opened)
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive(), "the server did not end"
    assert engine.cache.stats().num_referenced == 0
    engine.cache.check()

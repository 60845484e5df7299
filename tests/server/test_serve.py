"""The server as a process of its own: how it begins, and how it ends."""

from __future__ import annotations

import json
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_answers import PROMPT
from waiting import wait_until

from mlserve.cli import main
from mlserve.config import ServerConfig
from mlserve.server import serve
from mlserve.server.auth import Principal, create_key

LONG = {"prompt": PROMPT, "max_tokens": 2000, "temperature": 0, "stream": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY with room for answers that take seconds."""
    from tiny import write_tiny

    return write_tiny(tmp_path_factory.mktemp("long"), max_position_embeddings=8192)


@dataclass
class Running:
    process: subprocess.Popen[str]
    url: str
    greeting: str
    log: Path

    def logged(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line]


def _interruptible() -> None:
    """Tests may run in the background of a shell, which has its children ignore interrupts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def running(model: Path, log: Path, *options: str) -> Iterator[Running]:
    """`mlserve serve`, once it says where it listens."""
    command = [
        sys.executable,
        "-m",
        "mlserve.cli",
        "serve",
        str(model),
        "--port",
        "0",
        "--num-blocks",
        "2048",
        *options,
    ]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, preexec_fn=_interruptible
        ) as process,
    ):
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(3)]
            found = re.search(r"http://[0-9.:]+", lines[0])
            assert found, log.read_text()
            yield Running(process, found[0], "".join(lines), log)
        finally:
            if process.poll() is None:
                process.kill()


class Reader(threading.Thread):
    """Reads a stream to its end."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        super().__init__()
        self.url, self.body = url, body
        self.text = ""
        self.error: Exception | None = None
        self.begun: queue.Queue[None] = queue.Queue()

    def run(self) -> None:
        try:
            with httpx.stream(
                "POST", f"{self.url}/v1/completions", json=self.body, timeout=60, verify=False
            ) as response:
                for part in response.iter_text():
                    self.text += part
                    self.begun.put(None)
        except httpx.HTTPError as error:
            self.error = error
            self.begun.put(None)


def refuses(url: str) -> bool:
    try:
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 1).close()
    except ConnectionRefusedError:
        return True
    return False


def test_requests_that_run_end_before_the_server_does(long_model: Path, tmp_path: Path) -> None:
    with running(long_model, tmp_path / "log") as server:
        reader = Reader(server.url, LONG)
        reader.start()
        reader.begun.get(timeout=30)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: refuses(server.url), 5)
        assert server.process.poll() is None  # still at it
        reader.join(60)
        assert server.process.wait(20) == 0
    assert reader.error is None
    *events, done, rest = reader.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    last = json.loads(events[-1].removeprefix("data: "))["choices"][0]
    assert last["finish_reason"] == "length"
    assert not any("exception" in entry for entry in server.logged())


@pytest.mark.slow
def test_what_takes_too_long_is_cut(long_model: Path, tmp_path: Path) -> None:
    with running(long_model, tmp_path / "log", "--drain-timeout", "0.5") as server:
        reader = Reader(server.url, {**LONG, "max_tokens": 8000, "n": 8, "temperature": 1})
        reader.start()
        reader.begun.get(timeout=30)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        reader.join(20)
    assert isinstance(reader.error, httpx.RemoteProtocolError)
    assert "[DONE]" not in reader.text
    assert reader.text.startswith("data: {")


@pytest.mark.slow
def test_an_idle_server_ends_at_once(long_model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    key = create_key(keys, Principal("a"))
    options = ("--api-keys", str(keys), "--served-model-name", "mine", "--max-model-len", "64")
    with running(long_model, tmp_path / "log", *options) as server:
        assert "models: mine" in server.greeting
        assert f"curl {server.url}/v1/chat/completions" in server.greeting
        assert "Authorization: Bearer $MLSERVE_API_KEY" in server.greeting
        with httpx.Client(base_url=server.url, verify=False, headers={"Authorization": f"Bearer {key}"}) as http:
            assert http.get("/v1/models").json()["data"][0]["max_model_len"] == 64
            assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
            assert "server" not in http.get("/health").headers
            server.process.send_signal(signal.SIGTERM)  # while a client keeps its connection
            assert server.process.wait(10) == 0
    assert key not in server.log.read_text()
    paths = [entry["message"] for entry in server.logged() if entry["logger"] == "mlserve.server.access"]
    assert paths == ["GET /v1/models", "POST /v1/completions", "GET /health"]


@pytest.mark.slow
def test_an_interrupt_ends_it_as_interrupts_do(long_model: Path, tmp_path: Path) -> None:
    with running(long_model, tmp_path / "log") as server:
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(20) == 130
    assert not any("exception" in entry for entry in server.logged())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--api-keys", "/nowhere/keys.json"), "is no file of API keys"),
        (("--tool-call-format", "none"), "tool"),
        (("--adapter", "a=/nowhere"), "there is no such folder"),
    ],
)
def test_what_is_wrong_is_said_before_it_listens(
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr(serve, "configure_logging", lambda: None)  # it would take pytest's handlers away
    assert main(["serve", str(tiny_model_dir), "--port", "0", "--num-blocks", "8", *options]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("mlserve: ")
    assert message in said.err


@pytest.mark.parametrize(
    ("host", "keys", "warns"), [("0.0.0.0", None, True), ("0.0.0.0", "keys.json", False), ("127.0.0.1", None, False)]
)
def test_an_open_server_that_all_can_reach_is_warned_of(
    caplog: pytest.LogCaptureFixture, host: str, keys: str | None, warns: bool
) -> None:
    serve._warn_if_exposed(ServerConfig(host=host, api_keys=keys))
    assert bool(caplog.records) == warns

"""The log: one JSON object a line, and nothing in it that is the clients' own affair."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import make_engine
from failing import FailingRunner
from http_server import MODEL, Served, served
from tenants import Keys

from mlserve.engine.tokenizer import Tokenizer
from mlserve.server.auth import Principal
from mlserve.server.logs import JsonFormatter

SECRET = "plumage"
PIXELS = "iVBORw0KGgo" + "A" * 100


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Everything that is logged, from the most detailed level on."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    root, ours = logging.getLogger(), logging.getLogger("mlserve")
    root.addHandler(handler)
    before = root.level, ours.level
    root.setLevel(logging.INFO)
    ours.setLevel(logging.DEBUG)
    yield stream
    root.removeHandler(handler)
    root.setLevel(before[0])
    ours.setLevel(before[1])


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path, Principal("acme"))


def entries(log: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.getvalue().splitlines()]


def talk(server: Served, keys: Keys) -> None:
    """Requests of all outcomes, each with something that isn't to be told on."""
    http = keys.http(server, "acme")
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXELS}"}}
    for content, status in (
        (f"{SECRET} one", 200),
        (f"{SECRET}!", 500),
        (f"{SECRET}" * 100, 400),
        ([{"type": "text", "text": SECRET}, image], 400),
        ([{"type": SECRET}], 400),
        ([SECRET], 400),
    ):
        for stream in (False, True):
            messages = [{"role": "user", "content": content}]
            body = {"model": MODEL, "messages": messages, "max_tokens": 4, "user": "u1", "stream": stream}
            found = http.post("/v1/chat/completions", json=body).status_code
            assert found == status or (stream and found == 200)
    http.post("/v1/completions", json={"prompt": f"{SECRET}", "stop": SECRET, "cache_salt": SECRET, "max_tokens": 2})
    http.post("/v1/completions", content=f'{{"prompt": "{SECRET}')
    http.post("/tokenize", json={"prompt": SECRET})
    assert server.http(headers={"Authorization": f"Bearer {SECRET}"}).get("/v1/models").status_code == 401
    server.wait_until_idle()


def test_nothing_private_is_logged(tokenizer: Tokenizer, log: io.StringIO, keys: Keys) -> None:
    engine = make_engine(FailingRunner(128, 4), tokenizer, num_blocks=512, vocab_size=tokenizer.vocab_size)
    with served(engine, api_keys=str(keys.path)) as server:
        talk(server, keys)
    text = log.getvalue()
    for private in (SECRET, PIXELS, "base64", keys.by_tenant["acme"], keys.by_tenant["acme"].removeprefix("mls-")):
        assert private not in text, next(line for line in text.splitlines() if private in line)
    access = [entry for entry in entries(log) if entry["logger"] == "mlserve.server.access"]
    assert len(access) == 16
    assert access[0] | {"time": "", "request_id": "", "seconds": 0} == {
        "time": "", "level": "info", "logger": "mlserve.server.access", "message": "POST /v1/chat/completions",
        "request_id": "", "tenant": "acme", "user": "u1", "status": 200, "seconds": 0,
    }  # fmt: skip
    assert access[-1]["tenant"] is None
    assert [entry["status"] for entry in access[-2:]] == [200, 401]
    assert len({entry["request_id"] for entry in access}) == 16


def test_prompts_and_answers_are_logged_if_asked_for(tokenizer: Tokenizer, log: io.StringIO, keys: Keys) -> None:
    engine = make_engine(FailingRunner(128, 4), tokenizer, num_blocks=512, vocab_size=tokenizer.vocab_size)
    with served(engine, api_keys=str(keys.path), log_prompts=True) as server:
        http = keys.http(server, "acme")
        body = {"prompt": SECRET, "max_tokens": 3, "n": 2, "temperature": 1}
        choices = http.post("/v1/completions", json=body, headers={"X-Request-Id": "r1"}).json()["choices"]
    (entry,) = [entry for entry in entries(log) if "prompt" in entry]
    assert (entry["prompt"], entry["answer"]) == (SECRET, [choice["text"] for choice in choices])
    assert entry["request_id"].startswith("r1-")
    assert keys.by_tenant["acme"] not in log.getvalue()


def test_a_record_is_one_line_whatever_it_holds() -> None:
    record = logging.LogRecord("a", logging.ERROR, "f", 1, "%s\n\x00é\ud800", ('"x"',), None)
    record.__dict__.update(request_id="r", tenant=object(), other="not shown")
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        record.exc_info = (ValueError, error, error.__traceback__)
    line = JsonFormatter().format(record)
    assert "\n" not in line
    entry = json.loads(line)
    assert entry["message"] == '"x"\n\x00é\ud800'
    assert entry["level"] == "error"
    assert entry["time"].endswith("+00:00")
    assert "ValueError: two\nlines" in entry["exception"]
    assert set(entry) == {"time", "level", "logger", "message", "exception", "request_id", "tenant"}

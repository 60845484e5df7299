"""What goes wrong in the engine, and what takes too long."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from engines import make_engine
from failing import FailingRunner
from fakes import ContextRunner
from http_answers import HELLO, PROMPT, error_of, events
from http_server import MODEL, Served, served

from mlserve.engine.tokenizer import Tokenizer
from mlserve.model.plan import SequenceT, StepPlan, StepResult
from mlserve.server.routes import models

SMALL: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}


class Sluggish(ContextRunner):
    """Takes so many seconds a step."""

    def __init__(self, vocab_size: int, block_size: int, seconds: float) -> None:
        super().__init__(vocab_size, block_size)
        self.seconds = seconds

    def run(self, plan: StepPlan[SequenceT]) -> StepResult:
        time.sleep(self.seconds)
        return super().run(plan)


@pytest.fixture
def server(tokenizer: Tokenizer) -> Iterator[Served]:
    engine = make_engine(FailingRunner(128, 4), tokenizer, num_blocks=512, vocab_size=tokenizer.vocab_size)
    with served(engine) as server:
        yield server


@pytest.mark.parametrize("chat", [False, True])
def test_what_takes_too_long_is_ended(tokenizer: Tokenizer, chat: bool) -> None:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body = {"max_tokens": 400, **({"messages": HELLO} if chat else {"prompt": [PROMPT, "another"]})}
    engine = make_engine(Sluggish(128, 4, 0.03), tokenizer, num_blocks=512, vocab_size=tokenizer.vocab_size)
    with served(engine, request_timeout=0.3) as server:
        started = time.monotonic()
        error = error_of(server.http().post(path, json=body), 504)
        assert error["type"] == "timeout"
        assert "request_timeout" in error["message"]
        *chunks, last = events(server.http().post(path, json={**body, "stream": True}))
        assert chunks
        assert last["error"]["type"] == "timeout"
        assert time.monotonic() - started < 5
        server.wait_until_idle()
        assert server.http().post("/v1/completions", json={**SMALL, "max_tokens": 2}).status_code == 200


def test_who_waits_too_long_to_begin_is_told_with_a_status(tokenizer: Tokenizer) -> None:
    engine = make_engine(Sluggish(128, 4, 0.5), tokenizer, num_blocks=512, vocab_size=tokenizer.vocab_size)
    with served(engine, request_timeout=0.1) as server:
        error_of(server.http().post("/v1/completions", json={**SMALL, "stream": True}), 504)
        server.wait_until_idle()


def test_a_failed_step_fails_only_who_caused_it(server: Served) -> None:
    body = {**SMALL, "max_tokens": 60}
    alone = server.http().post("/v1/completions", json=body).json()["choices"]
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda: answers.append(server.http().post("/v1/completions", json=body)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for _ in range(10):
        error = error_of(server.http().post("/v1/completions", json={**SMALL, "prompt": "fail!"}), 500)
        assert error["type"] == "server_error"
        assert "poisoned" in error["message"]
    for thread in threads:
        thread.join()
    assert [answer.json()["choices"] for answer in answers] == [alone] * 4
    server.wait_until_idle()


def test_one_of_several_prompts_that_fails_fails_the_request(server: Served) -> None:
    body = {**SMALL, "prompt": ["fine", "fail!", "fine too"], "max_tokens": 50}
    error_of(server.http().post("/v1/completions", json=body), 500)
    *_, last = events(server.http().post("/v1/completions", json={**body, "stream": True}))
    assert "poisoned" in last["error"]["message"]
    server.wait_until_idle()


def test_an_engine_that_fails_outside_the_model_serves_on(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def plan() -> None:
        monkeypatch.undo()
        raise RuntimeError("a defect")

    monkeypatch.setattr(server.engine.scheduler, "plan", plan)
    assert "a defect" in error_of(server.http().post("/v1/completions", json=SMALL), 500)["message"]
    assert server.http().post("/v1/completions", json=SMALL).status_code == 200


def test_an_engine_that_has_ended_is_not_ready(server: Served) -> None:
    server.serving.engine.close()
    assert server.http().get("/health").status_code == 200
    assert server.http().get("/ready").status_code == 503
    for path in ("/metrics", "/v1/cache"):
        error_of(server.http().get(path), 503)
    error_of(server.http().post("/v1/completions", json=SMALL), 503)
    with pytest.raises(openai.InternalServerError):
        server.client().chat.completions.create(model=MODEL, messages=HELLO, stream=True)


def test_a_defect_is_logged_and_says_nothing_of_itself(
    server: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: object) -> None:
        raise KeyError("an inner secret")

    monkeypatch.setattr(models, "_base", broken)
    caplog.set_level(logging.INFO)
    http = server.http(headers={"X-Request-Id": "mine"})
    response = http.get("/v1/models")
    error = error_of(response, 500)
    assert (error["type"], error["message"]) == ("server_error", "the server failed: its log says more")
    assert response.headers["x-request-id"] == "mine"
    assert http.get("/health").status_code == 200  # over the same connection
    (logged,) = [record for record in caplog.records if record.exc_info]
    assert logged.name == "mlserve.server.errors"
    (access,) = [record for record in caplog.records if getattr(record, "status", None) == 500]
    assert access.__dict__["request_id"] == "mine"

"""How many requests there may be, of all and of each tenant."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import openai
import pytest
from engines import make_engine
from failing import FailingRunner
from http_answers import HELLO, PROMPT, error_of
from http_server import MODEL, Served, served
from streaming import SlowRunner
from tenants import Keys
from waiting import wait_until

from mlserve.engine.engine import Engine
from mlserve.engine.tokenizer import Tokenizer
from mlserve.server.auth import ANYONE, Principal
from mlserve.server.errors import ApiError
from mlserve.server.gate import Gate

LONG = {"model": MODEL, "prompt": PROMPT, "max_tokens": 400}


def slow_engine(tokenizer: Tokenizer) -> Engine:
    return make_engine(SlowRunner(128, 4), tokenizer, num_blocks=1024, vocab_size=tokenizer.vocab_size)


def too_many(response: httpx.Response) -> str:
    error = error_of(response, 429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert int(response.headers["retry-after"]) >= 1
    return str(error["message"])


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    holders = (Principal("two", max_concurrent=2), Principal("rated", requests_per_minute=3), Principal("free"))
    return Keys(tmp_path_factory.mktemp("keys"), *holders)


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer, keys: Keys) -> Iterator[Served]:
    with served(slow_engine(tokenizer), api_keys=str(keys.path), max_requests=4) as server:
        yield server


def test_a_tenant_has_so_many_at_once(server: Served, keys: Keys) -> None:
    http = keys.http(server, "two")
    with ExitStack() as streams:
        for _ in range(2):
            streams.enter_context(http.stream("POST", "/v1/completions", json={**LONG, "stream": True}))
        assert "2 requests of this tenant run" in too_many(http.post("/v1/completions", json=LONG))
        assert "2 requests of this tenant run" in too_many(
            http.post("/v1/chat/completions", json={"messages": HELLO, "stream": True})
        )
        assert keys.http(server, "free").post("/v1/completions", json={**LONG, "max_tokens": 1}).status_code == 200
        assert http.get("/v1/models").status_code == 200
    server.wait_until_idle()
    assert http.post("/v1/completions", json={**LONG, "max_tokens": 1}).status_code == 200


def test_the_server_has_so_many_at_once(server: Served, keys: Keys) -> None:
    http = keys.http(server, "free")
    with ExitStack() as streams:
        for _ in range(4):
            streams.enter_context(http.stream("POST", "/v1/completions", json={**LONG, "stream": True}))
        assert "the server has 4 requests" in too_many(keys.http(server, "two").post("/v1/completions", json=LONG))
        with pytest.raises(openai.RateLimitError):
            server.client(key=keys.by_tenant["two"]).chat.completions.create(model=MODEL, messages=HELLO)
        assert server.http().get("/health").status_code == 200
    server.wait_until_idle()


def test_a_tenant_has_so_many_a_minute(server: Served, keys: Keys) -> None:
    http = keys.http(server, "rated")
    small = {**LONG, "max_tokens": 1}
    assert [http.post("/v1/completions", json=small).status_code for _ in range(3)] == [200] * 3
    response = http.post("/v1/completions", json=small)
    assert "this tenant sent 3 requests in a minute" in too_many(response)
    assert 50 <= int(response.headers["retry-after"]) <= 60
    assert keys.http(server, "free").post("/v1/completions", json=small).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {**LONG, "prompt": "x" * 600}, 400),
        ("/v1/completions", {**LONG, "prompt": ["a", ""], "stream": True}, 400),
        ("/v1/completions", {**LONG, "temperature": -1}, 400),
        ("/v1/completions", {**LONG, "model": "other"}, 404),
        ("/v1/completions", {**LONG, "prompt": "fail!"}, 500),
        ("/v1/completions", {**LONG, "prompt": "fail!", "stream": True}, 200),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "fail!"}]}, 500),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 600}], "stream": True}, 400),
    ],
)
def test_errors_give_the_place_back(tokenizer: Tokenizer, path: str, body: dict[str, object], status: int) -> None:
    engine = make_engine(FailingRunner(128, 4), tokenizer, num_blocks=512, vocab_size=tokenizer.vocab_size)
    with served(engine, max_requests=1) as server:
        for _ in range(3):
            assert server.http().post(path, json=body).status_code == status
            server.wait_until_idle()
        assert server.http().post("/v1/completions", json={**LONG, "max_tokens": 2}).status_code == 200


def test_who_leaves_gives_the_place_back(server: Served, keys: Keys) -> None:
    http = keys.http(server, "two")
    for _ in range(3):
        server.leave_unanswered("/v1/completions", {**LONG, "n": 4}, Authorization=http.headers["Authorization"])
        with http.stream("POST", "/v1/completions", json={**LONG, "n": 4, "stream": True}) as response:
            next(response.iter_bytes())
        wait_until(lambda: server.serving.gate.num_requests == 0, 5)
    assert not server.serving.gate._of_tenant


def test_counts_are_those_of_who_is_inside() -> None:
    gate = Gate(max_requests=2)
    tenant = Principal("a", max_concurrent=1)
    with gate.enter(ANYONE), gate.enter(tenant):
        assert gate.num_requests == 2
        with pytest.raises(ApiError, match="the server has 2 requests"), gate.enter(ANYONE):
            pass
        assert gate.num_requests == 2
    assert (gate.num_requests, gate._of_tenant) == (0, {})
    with gate.enter(tenant):
        with pytest.raises(ApiError, match="1 requests of this tenant run"), gate.enter(tenant):
            pass
        with gate.enter(Principal("b", max_concurrent=1)):
            assert gate.num_requests == 2
    with pytest.raises(KeyError), gate.enter(tenant):
        raise KeyError
    assert (gate.num_requests, gate._of_tenant) == (0, {})


def test_what_is_refused_does_not_count_for_the_rate() -> None:
    gate = Gate(max_requests=1)
    rated = Principal("a", requests_per_minute=2)
    with gate.enter(ANYONE):
        for _ in range(5):
            with pytest.raises(ApiError, match="the server has 1"), gate.enter(rated):
                pass
    for _ in range(2):
        with gate.enter(rated):
            pass
    for _ in range(3):
        with pytest.raises(ApiError, match="2 requests in a minute"), gate.enter(rated):
            pass

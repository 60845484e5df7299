"""Public bug reports about bodies, keys, limits and metrics of the server."""

from __future__ import annotations

import json
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from engines import make_engine
from fake_adapters import FakeRegistry, fake_adapter
from fakes import ContextRunner
from http_answers import HELLO, POST_ROUTES, PROMPT, error_of
from http_server import MODEL, Served, served
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

from mlserve.engine.engine import Engine
from mlserve.engine.tokenizer import Tokenizer
from mlserve.server.app import create_app
from mlserve.server.auth import Principal, create_key
from mlserve.server.middleware import OPEN_PATHS

JSON = {"Content-Type": "application/json"}
NESTED = "[" * 200 + "]" * 200


def small_engine(tokenizer: Tokenizer, **options: Any) -> Engine:
    runner = ContextRunner(128, 4)
    return make_engine(runner, tokenizer, num_blocks=512, vocab_size=tokenizer.vocab_size, **options)


@pytest.fixture(scope="module")
def admin(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, str]]:
    """A server with one key, that of an administrator."""
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    key = create_key(path, Principal("owner", is_admin=True))
    with served(small_engine(tokenizer), api_keys=str(path)) as server:
        yield server, key


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Served]:
    with served(small_engine(tokenizer)) as server:
        yield server


@pytest.mark.parametrize("path", POST_ROUTES)
@pytest.mark.parametrize(
    "body", ["[]", '"x"', "1", "null", "true", "{", "", "NaN", '{"model": NaN}', NESTED, f'{{"messages": {NESTED}}}']
)
def test_5_06_bodies_that_are_no_objects(admin: tuple[Served, str], path: str, body: str) -> None:
    """As the administrator, so that nothing but the body is wrong."""
    server, key = admin
    for headers in (JSON, {}, {"Content-Type": "text/plain"}):
        response = server.http().post(
            path, content=body.encode(), headers={**headers, "Authorization": f"Bearer {key}"}
        )
        assert error_of(response, 400)["type"] == "invalid_request_error"


def test_5_06_numbers_that_are_none(server: Served) -> None:
    body = f'{{"model": "{MODEL}", "prompt": "x", "temperature": NaN}}'
    assert error_of(server.http().post("/v1/completions", content=body, headers=JSON), 400)["param"] == "temperature"


def odd_spellings(path: str) -> list[str]:
    """Ways to ask for a path that a careless server takes for that path, or for one that needs no key."""
    return [path, f"/{path}", f"{path}/", path.upper(), path.replace("/", "//"), f"/./{path}", f"/health/..{path}",
            f"/health/../{path}", f"{path}?x=/health", path.replace("v1", "%76%31"), f"{path}%00",
            f"{path};/health", f"{path}%2f..%2f..%2fhealth"]  # fmt: skip


def test_5_07_every_route_needs_a_key(admin: tuple[Served, str]) -> None:
    server, key = admin
    app = create_app(server.serving)
    paths = {route.path for route in app.routes if isinstance(route, Route)}
    paths |= {path for path, operations in app.openapi()["paths"].items()}
    assert {"/v1/chat/completions", "/v1/load_lora_adapter", "/v1/cache/reset", "/metrics", "/openapi.json"} <= paths
    assert (
        {"/health", "/ready"} <= OPEN_PATHS <= {"/", "/health", "/ready", *(p for p in OPEN_PATHS if "/static/" in p)}
    )
    http = server.http()
    wrong = ("Bearer wrong", f"Basic {key}", "Bearer", key, f"bearer {key}x", f"Bearer {key[:-1]}", "Bearer \xff")
    for path in sorted(paths - OPEN_PATHS):
        concrete = path.replace("{name}", "a").replace("{model:path}", "a").replace("{model}", "a")
        tries = [(method, concrete, None) for method in ("GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE")]
        tries += [("POST", concrete, each) for each in wrong]
        tries += [(method, spelling, None) for method in ("GET", "POST") for spelling in odd_spellings(concrete)]
        for method, spelling, authorization in tries:
            headers = {} if authorization is None else {"Authorization": authorization.encode("latin-1")}
            request = httpx.Request(method, server.url, headers=headers)
            request.url = request.url.copy_with(raw_path=spelling.encode())
            response = http.send(request)
            assert response.status_code == 401, (method, spelling, authorization)
            assert response.headers["www-authenticate"] == "Bearer"
    assert http.get("/v1/models", headers={"Authorization": f"bearer  {key}"}).status_code == 200
    assert server.engine.stats().num_running == 0


def test_5_07_open_paths_tell_nothing(admin: tuple[Served, str]) -> None:
    server, _ = admin
    assert server.http().get("/health").json() == {"status": "ok"}
    assert server.http().get("/ready").json() == {"status": "ready"}
    for path in OPEN_PATHS:
        assert server.http().request("POST", path).status_code == 405
        assert server.http().get(path).status_code == 200


def test_5_07_changes_need_an_administrator(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = create_key(path, Principal("somebody"))
    with served(small_engine(tokenizer), api_keys=str(path)) as server:
        http = server.http(headers={"Authorization": f"Bearer {key}"})
        assert http.get("/v1/models").status_code == 200
        for method, route, body in (
            ("POST", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/"}),
            ("POST", "/v1/unload_lora_adapter", {"lora_name": "a"}),
            ("PUT", "/v1/adapters/a", {"path": "/"}),
            ("DELETE", "/v1/adapters/a", None),
            ("POST", "/v1/cache/reset", None),
            ("GET", "/v1/cache/blocks", None),
        ):
            assert error_of(http.request(method, route, json=body), 403)["code"] == "forbidden"


@pytest.mark.parametrize(
    "more",
    [
        {"n": 1_000_000},
        {"logprobs": 1_000_000},
        {"stop": ["a"] * 100_000},
        {"prompt": ["a"] * 100_000},
        {"prompt": ["1"] * 100_000},
        {"prompt": [[1]] * 20_000},
        {"prompt": ["a"] * 256, "n": 128},
        {"stop_token_ids": ["x"] * 100_000},
        {f"field{i}": 1 for i in range(20_000)},
        {"stream_options": {f"field{i}": 1 for i in range(20_000)}},
    ],
    ids=["n", "logprobs", "stop", "texts", "digits", "ids", "both", "tokens", "fields", "inner"],
)
def test_5_08_huge_requests_are_refused_at_once(server: Served, more: dict[str, Any]) -> None:
    """Bounds are on the work done, by both ends and with another request beside it: other processes cost time too."""
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 4, **more}).encode()
    small = {"model": MODEL, "prompt": "x", "max_tokens": 4}
    http, other = server.http(), server.http()
    http.post("/v1/completions", json=small)
    other.post("/v1/completions", json=small)
    memory, took = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for _ in range(3):
        answers: list[httpx.Response] = []
        beside = threading.Thread(target=lambda: answers.append(other.post("/v1/completions", json=small)))  # noqa: B023
        started = time.process_time()
        beside.start()
        error_of(http.post("/v1/completions", content=body, headers=JSON), 400)
        beside.join()
        took.append(time.process_time() - started)
        assert answers[0].status_code == 200
    assert min(took) < 0.1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 50 * 1024  # KiB
    server.wait_until_idle()


def test_5_10_one_series_for_each_adapter_that_is_served(tokenizer: Tokenizer, tmp_path: Path) -> None:
    key = create_key(tmp_path / "keys.json", Principal("owner", is_admin=True))
    names = [f"adapter{i}" for i in range(49)] + ['odd "name", with a \\backslash']
    registry = FakeRegistry(**{name: fake_adapter(name) for name in names})
    engine = small_engine(tokenizer, adapters=registry, max_loras=4)
    with served(engine, api_keys=str(tmp_path / "keys.json")) as server:
        http = server.http(headers={"Authorization": f"Bearer {key}"})
        for name in names:
            body = {"model": name, "messages": HELLO, "max_tokens": 1}
            assert http.post("/v1/chat/completions", json=body).status_code == 200
        for i in range(100):
            body = {"model": f"unknown{i}", "prompt": PROMPT}
            assert error_of(http.post("/v1/completions", json=body), 404)["code"] == "model_not_found"
        assert http.post("/v1/completions", json={"prompt": PROMPT}).status_code == 200
        error_of(http.post("/v1/load_lora_adapter", json={"lora_name": "a\nb", "lora_path": "/"}), 403)

        def counts() -> dict[str, float]:
            families = {f.name: f for f in text_string_to_metric_families(http.get("/metrics").text)}
            samples = families["mlserve_requests"].samples
            return {s.labels["model"]: s.value for s in samples if s.name == "mlserve_requests_total"}

        assert counts() == {MODEL: 1, **dict.fromkeys(names, 1)}
        for name in names:
            assert http.delete(f"/v1/adapters/{quote(name, safe='')}").status_code == 200
        assert counts() == {MODEL: 1}

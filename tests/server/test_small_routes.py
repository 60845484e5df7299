"""Models, tokens, the version, and pages of other origins."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engines import make_engine
from fake_adapters import FakeRegistry, fake_adapter
from fakes import ContextRunner
from http_answers import HELLO, error_of
from http_server import MODEL, Served, served
from tenants import Keys

from mlserve import __version__
from mlserve.engine.engine import Engine
from mlserve.engine.tokenizer import Tokenizer
from mlserve.server.auth import Principal


def small_engine(tokenizer: Tokenizer) -> Engine:
    registry = FakeRegistry(a=fake_adapter("a"))
    return make_engine(
        ContextRunner(128, 4), tokenizer, num_blocks=64, vocab_size=tokenizer.vocab_size, adapters=registry
    )


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Served]:
    with served(small_engine(tokenizer)) as server:
        yield server


def test_models(server: Served) -> None:
    base, adapter = server.http().get("/v1/models").json()["data"]
    assert (base["id"], base["parent"], base["root"]) == (MODEL, None, MODEL)
    assert (base["max_model_len"], base["takes_images"]) == (512, False)
    assert (adapter["id"], adapter["parent"], adapter["root"]) == ("a", MODEL, MODEL)
    client = server.client()
    assert client.models.retrieve("a").id == "a"
    assert server.http().get(f"/v1/models/{MODEL}").json() == base
    for unknown in ("b", "", "a/b", "a%2Fb", "%00", "x" * 2000):
        assert error_of(server.http().get(f"/v1/models/{unknown}"), 404)["code"] == "model_not_found"


def test_another_name_for_the_base_model(tokenizer: Tokenizer) -> None:
    with served(small_engine(tokenizer), served_model_name="gpt") as server:
        assert [model.id for model in server.client().models.list()] == ["gpt", "a"]
        assert server.client().completions.create(model="gpt", prompt="x", max_tokens=1).model == "gpt"
        error_of(server.http().post("/v1/completions", json={"model": MODEL, "prompt": "x"}), 404)
        assert server.http().post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).json()["model"] == "gpt"


@pytest.mark.parametrize("text", ["hello", "é🌶\n", "<|im_end|>x", "\x00", " ", ""])
def test_text_to_tokens_and_back(server: Served, tokenizer: Tokenizer, text: str) -> None:
    found = server.http().post("/tokenize", json={"prompt": text}).json()
    assert found == {"tokens": tokenizer.encode(text), "count": len(tokenizer.encode(text)), "max_model_len": 512}
    assert server.http().post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text}


def test_a_conversation_to_tokens(server: Served) -> None:
    http = server.http()
    found = http.post("/tokenize", json={"messages": HELLO, "model": "a"}).json()
    shown = http.post("/detokenize", json={"tokens": found["tokens"]}).json()["prompt"]
    assert shown == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    shorter = http.post("/tokenize", json={"messages": HELLO, "add_generation_prompt": False}).json()
    assert shorter["tokens"] == found["tokens"][: shorter["count"]]
    assert shorter["count"] < found["count"]
    usage = http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 1}).json()["usage"]
    assert usage["prompt_tokens"] == found["count"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": HELLO}),
        ("/tokenize", {"messages": []}),
        ("/tokenize", {"messages": [{"role": "user"}]}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [1, 320]}),
    ],
)
def test_what_is_neither(server: Served, path: str, body: dict[str, object]) -> None:
    error_of(server.http().post(path, json=body), 400)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_tokens_of_an_unknown_model(server: Served, path: str) -> None:
    body = {"model": "nobody", "prompt": "x", "tokens": [1]}
    del body["tokens" if path == "/tokenize" else "prompt"]
    assert error_of(server.http().post(path, json=body), 404)["param"] == "model"


def test_the_version_and_paths_that_are_not(server: Served) -> None:
    assert server.http().get("/version").json() == {"version": __version__}
    for path in ("/v1/nothing", "//v1/models", "/V1/models", "/docs", "/redoc", "/static/../page.py", "/static/x"):
        assert server.http().get(path).status_code == 404
    for method, path in (("GET", "/v1/completions"), ("POST", "/v1/models"), ("PUT", "/health")):
        response = server.http().request(method, path)
        error_of(response, 405)
        assert response.headers["allow"]


def test_pages_of_allowed_origins_only(tokenizer: Tokenizer, keys: Keys) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    with served(
        small_engine(tokenizer), api_keys=str(keys.path), allowed_origins="https://a.example, https://b.example"
    ) as server:
        for origin, is_allowed in (("https://b.example", True), ("https://evil.example", False), ("null", False)):
            preflight = server.http().options("/v1/completions", headers={"Origin": origin, **asked})
            assert preflight.status_code == (200 if is_allowed else 400)
            assert preflight.headers.get("access-control-allow-origin") == (origin if is_allowed else None)
            for headers, status in ((keys.headers("a"), 200), ({}, 401)):
                response = server.http().get("/v1/models", headers={"Origin": origin, **headers})
                assert response.status_code == status
                assert response.headers.get("access-control-allow-origin") == (origin if is_allowed else None)
                assert "access-control-allow-credentials" not in response.headers
    with served(small_engine(tokenizer)) as server:
        preflight = server.http().options("/v1/completions", headers={"Origin": "https://a.example", **asked})
        assert preflight.status_code == 405
        assert not any(name.startswith("access-control") for name in preflight.headers)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys"), Principal("a"))


def test_responses_are_not_guessed_at(server: Served) -> None:
    for path in ("/health", "/v1/models", "/v1/nothing"):
        headers = server.http().get(path).headers
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")

"""What bodies may hold, and how long they may be."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from engines import make_engine
from fakes import ContextRunner
from http_answers import HELLO, POST_ROUTES, PROMPT, error_of
from http_server import MODEL, Served, served

from mlserve.engine.tokenizer import Tokenizer
from mlserve.server.errors import ApiError

JSON = {"Content-Type": "application/json"}
LIMIT = 10_000


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Served]:
    engine = make_engine(ContextRunner(128, 4), tokenizer, num_blocks=512, vocab_size=tokenizer.vocab_size)
    with served(engine, max_body_bytes=LIMIT) as server:
        yield server


def completion(**more: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": 2, **more}).encode()


@pytest.mark.parametrize("path", POST_ROUTES)
def test_a_body_of_stated_length(server: Served, path: str) -> None:
    error = error_of(server.http().post(path, content=b" " * (LIMIT + 1), headers=JSON), 413)
    assert f"more than {LIMIT} bytes" in error["message"]


@pytest.mark.parametrize("path", POST_ROUTES)
def test_a_body_of_unstated_length(server: Served, path: str) -> None:
    chunks = (b" " * 1000 for _ in range(11))
    assert (
        f"more than {LIMIT} bytes" in error_of(server.http().post(path, content=chunks, headers=JSON), 413)["message"]
    )


def test_a_body_just_within_the_limit(server: Served) -> None:
    body = completion()
    body += b" " * (LIMIT - len(body))
    assert server.http().post("/v1/completions", content=body, headers=JSON).status_code == 200
    assert server.http().post("/v1/completions", content=iter([body]), headers=JSON).status_code == 200


def test_an_endless_body_is_not_read_to_its_end(server: Served) -> None:
    """A client that says it will send 100 GB, or doesn't say, gets its answer at once."""
    address = urlsplit(server.url)
    for head in (b"Content-Length: 100000000000\r\n", b"Transfer-Encoding: chunked\r\n"):
        with socket.create_connection((address.hostname, address.port), 10) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + head)
            client.sendall(b"\r\n" + (b"2af8\r\n" + b" " * 11_000 + b"\r\n" if b"chunked" in head else b""))
            assert client.recv(100).startswith(b"HTTP/1.1 413 ")


SURROGATE = '"\\ud800"'


@pytest.mark.parametrize(
    "body",
    [
        '{"prompt": %s}',
        '{"prompt": "x", "model": %s}',
        '{"prompt": "x", "user": %s}',
        '{"prompt": "x", "bad_words": [%s]}',
        '{"prompt": "x", "cache_salt": %s}',
        '{"prompt": "x", %s: 1}',
        '{"prompt": "x", "logit_bias": {%s: 1}}',
        '{"prompt": [%s]}',
    ],
)
def test_half_characters_in_completions(server: Served, body: str) -> None:
    error_of(server.http().post("/v1/completions", content=body % SURROGATE, headers=JSON), 400)


@pytest.mark.parametrize(
    "body",
    [
        '{"messages": [{"role": "user", "content": %s}]}',
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": %s}]}]}',
        '{"messages": [{"role": "user", "content": [{"type": %s}]}]}',
        '{"messages": [{"role": "user", "content": [{%s: %s}]}]}'.replace("%s: ", "%s: ", 1),
        '{"messages": [{"role": %s, "content": "x"}]}',
        '{"messages": [{"role": "user", "content": "x", "name": %s}]}',
        '{"messages": [{"role": "user", "content": "x", %s: 1}]}',
        '{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": %s}}',
        '{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": %s}}',
        '{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {"name": %s}}]}',
        '{"messages": [{"role": "user", "content": "x"}], "tool_choice": %s}',
    ],
)
def test_half_characters_in_chats(server: Served, body: str) -> None:
    body = body.replace("%s", SURROGATE)
    error_of(server.http().post("/v1/chat/completions", content=body, headers=JSON), 400)
    if body.startswith('{"messages": [{"role": "user", "content"') and "kwargs" not in body:
        assert server.http().post("/tokenize", content=body, headers=JSON).status_code in (200, 400)


def test_half_characters_that_never_occur(server: Served) -> None:
    """What no answer can hold stops none, and what no template asks for isn't read."""
    body = f'{{"prompt": "x", "stop": {SURROGATE}}}'
    assert server.http().post("/v1/completions", content=body, headers=JSON).status_code == 200
    body = f'{{"messages": [{{"role": "user"}}], "chat_template_kwargs": {{{SURROGATE}: 1}}}}'.replace(
        '"user"', '"user", "content": "x"'
    )
    assert server.http().post("/v1/chat/completions", content=body, headers=JSON).status_code == 200


def test_text_of_all_kinds_is_taken(server: Served) -> None:
    for text in ("\x00", "\ufdd0", "\ufffe\uffff", "🌶👨\u200d👩", "\u202e<|im_end|>", "ￃ" * 20, "\x7f\x1b[2J"):
        response = server.http().post("/v1/completions", json={"prompt": text, "max_tokens": 1, "echo": True})
        assert response.status_code == 200
        assert response.json()["choices"][0]["text"].startswith(text)
        chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
        assert server.http().post("/v1/chat/completions", json=chat).status_code == 200


HUGE = "1" + "0" * 400


@pytest.mark.parametrize(
    "field",
    ["temperature", "top_p", "n", "seed", "presence_penalty", "frequency_penalty", "min_p", "min_tokens", "logprobs",
     "repetition_penalty", "priority"],
)  # fmt: skip
@pytest.mark.parametrize("value", [HUGE, f"-{HUGE}", "9" * 5000, "NaN", "-Infinity"])
def test_numbers_beyond_all_bounds(server: Served, field: str, value: str) -> None:
    body = f'{{"prompt": "x", "{field}": {value}}}'
    error_of(server.http().post("/v1/completions", content=body, headers=JSON), 400)


@pytest.mark.parametrize(
    "ids", ["[1, true]", "[1.0]", '["1", 1]', f"[{HUGE}]", "[null]", "[[1], 1]", '[[1], "x"]', "{}"]
)
def test_ids_are_integers(server: Served, ids: str) -> None:
    body = f'{{"prompt": {ids}}}'
    error_of(server.http().post("/v1/completions", content=body, headers=JSON), 400)
    if not ids.startswith("[["):
        body = f'{{"tokens": {ids}}}'
        error_of(server.http().post("/detokenize", content=body, headers=JSON), 400)


@pytest.mark.parametrize("depth", [40, 260, 900, 5000])
@pytest.mark.parametrize("kind", [("[", "]"), ('{"a":', "}")])
def test_deep_values(server: Served, depth: int, kind: tuple[str, str]) -> None:
    value = kind[0] * depth + "1" + kind[1] * depth
    if len(value) > LIMIT - 200:
        pytest.skip("longer than a body may be")
    for field in (
        '"messages": [{"role": "user", "content": "x", "y": %s}]',
        '"messages": [{"role": "user", "content": [%s]}]',
    ):
        error_of(
            server.http().post("/v1/chat/completions", content="{" + field.replace("%s", value) + "}", headers=JSON),
            400,
        )
    for field in ("chat_template_kwargs", "response_format", "tools", "tool_choice", "stream_options", "logit_bias"):
        body = f'{{"messages": [{{"role": "user", "content": "x"}}], "{field}": {value}}}'
        error_of(server.http().post("/v1/chat/completions", content=body, headers=JSON), 400)


def test_fields_that_are_unknown_are_named(server: Served) -> None:
    error = error_of(server.http().post("/v1/completions", json={"prompt": "x", "best_of": 2}), 400)
    assert (error["param"], "best_of" in error["message"]) == ("best_of", True)
    error = error_of(server.http().post("/v1/chat/completions", json={"messages": HELLO, "stream_options": {}}), 400)
    assert "stream_options is given without stream" in error["message"]


@pytest.mark.parametrize("key", ["x", "-1", "1.0", "9" * 5000, "", "²", "320", "1 "])
def test_keys_of_logit_bias_are_ids(server: Served, key: str) -> None:
    error_of(server.http().post("/v1/completions", content=completion(logit_bias={key: 1}), headers=JSON), 400)


def test_a_message_with_half_a_character_can_be_sent() -> None:
    response = ApiError(400, "there is no '\ud800'").response()
    assert json.loads(bytes(response.body))["error"]["message"] == "there is no '\\ud800'"


@pytest.mark.parametrize("same", ["abc", "x" * 64, "A.b_c-1"])
def test_two_requests_may_bear_the_same_id(server: Served, same: str) -> None:
    """Both are answered, at once, and each under that id."""
    with httpx.Client(base_url=server.url, verify=False, timeout=30, headers={"X-Request-Id": same}) as http:
        body = {"prompt": PROMPT, "max_tokens": 300, "stream": True}
        with (
            http.stream("POST", "/v1/completions", json=body) as one,
            http.stream("POST", "/v1/completions", json=body) as two,
        ):
            answers = [response.read() for response in (two, one)]
            assert [response.status_code for response in (one, two)] == [200, 200]
            assert [response.headers["x-request-id"] for response in (one, two)] == [same, same]
    ids = {json.loads(answer.split(b"\n")[0].removeprefix(b"data: "))["id"] for answer in answers}
    assert len(ids) == 2
    assert all(each.startswith(f"cmpl-{same}-") for each in ids)


@pytest.mark.parametrize("odd", ["x" * 65, "a b", "é", "a\tb", "<script>"])
def test_odd_request_ids_are_replaced(server: Served, odd: str) -> None:
    response = server.http().get("/health", headers={"X-Request-Id": odd.encode()})
    assert len(response.headers["x-request-id"]) == 32

"""Public bug reports about streams, logprobs and chat templates, over HTTP. Row 5-09 is in test_area5_tools.py, what
must be refused in test_area5_refusals.py."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from engines import make_engine
from failing import FailingRunner
from http_answers import HELLO, PROMPT, error_of, events, joined
from http_server import MODEL, Served, served
from tiny_adapters import write_adapter

from mlserve import LLM
from mlserve.engine.tokenizer import Tokenizer, load_tokenizer

GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 8}
ASCII = list(range(32, 127))  # what may be generated, where bytes are compared


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Served]:
    """A prompt with '!' fails at its third token."""
    runner = FailingRunner(128, 4)
    with served(make_engine(runner, tokenizer, num_blocks=512, vocab_size=tokenizer.vocab_size)) as server:
        yield server


@pytest.fixture(scope="module")
def real(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """TINY with the adapter 'a'."""
    folder = tmp_path_factory.mktemp("adapters")
    write_adapter(folder / "a", tiny_model_dir, 1)
    llm = LLM(str(tiny_model_dir), adapters={"a": folder / "a"}, block_size=4, num_blocks=256)
    with served(llm.engine) as server:
        yield server


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_5_01_usage_only_when_asked_for(server: Served, path: str) -> None:
    body = {**GREEDY, **({"messages": HELLO} if "chat" in path else {"prompt": PROMPT})}
    usage = server.http().post(path, json=body).json()["usage"]
    assert usage["completion_tokens"] == 8
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8
    for options in ({}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}):
        *chunks, done = events(server.http().post(path, json={**body, "stream": True, **options}))
        assert done == "[DONE]"
        assert not any("usage" in chunk for chunk in chunks)
        assert all(chunk["choices"] for chunk in chunks)
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, done = events(server.http().post(path, json=asked))
    assert done == "[DONE]"
    assert not any(chunk.get("usage") for chunk in chunks)
    assert last["choices"] == []
    without_cache = {"prompt_tokens_details"}
    assert {k: v for k, v in last["usage"].items() if k not in without_cache} == {
        k: v for k, v in usage.items() if k not in without_cache
    }
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == (usage["prompt_tokens"] - 1) // 4 * 4


def test_5_02_before_the_first_byte_an_error_has_its_status(server: Served) -> None:
    client = server.client()
    long = [{"role": "user", "content": "x" * 600}]
    for call in (
        lambda: client.chat.completions.create(model=MODEL, messages=long, stream=True),
        lambda: client.completions.create(model=MODEL, prompt="x" * 600, stream=True),
        lambda: client.completions.create(model=MODEL, prompt=["fine", "x" * 600], stream=True),
    ):
        with pytest.raises(openai.BadRequestError, match="the model takes 512") as raised:
            call()
        assert raised.value.type == "invalid_request_error"


@pytest.mark.parametrize("n", [1, 3])
def test_5_02_later_an_error_is_an_event_and_ends_the_stream(server: Served, n: int) -> None:
    client = server.client()
    bad = [{"role": "user", "content": "fail!"}]
    for stream in (
        client.chat.completions.create(messages=bad, stream=True, n=n, **{**GREEDY, "temperature": 1}),
        client.completions.create(prompt="fail!", stream=True, n=n, **{**GREEDY, "temperature": 1}),
    ):
        started, chunks = time.monotonic(), list[Any]()
        with pytest.raises(openai.APIError, match="poisoned") as raised:
            chunks.extend(stream)
        assert raised.value.type == "server_error"
        assert len(chunks) >= 2
        assert time.monotonic() - started < 2
    response = server.http().post("/v1/completions", json={**GREEDY, "prompt": "fail!", "stream": True})
    *chunks, last = events(response)
    assert set(last) == {"error"}
    assert not any("error" in chunk for chunk in chunks)
    server.wait_until_idle()


def test_5_02_an_adapter_unloaded_meanwhile_answers_to_the_end(real: Served) -> None:
    client, adapters = real.client(), real.serving.adapters
    wanted = {**GREEDY, "model": "a", "max_tokens": 200}
    path = next(info.path for info in adapters.list() if info.name == "a")
    whole = client.completions.create(prompt=PROMPT, **wanted).choices[0].text
    stream = iter(client.completions.create(prompt=PROMPT, stream=True, **wanted))
    first = next(stream)
    adapters.unload("a")
    try:
        with pytest.raises(openai.NotFoundError, match="no model 'a'"):
            client.completions.create(prompt=PROMPT, **wanted)
        answer = joined([first, *stream])[0]
        assert (answer.text, answer.reasons) == (whole, ["length"])
    finally:
        adapters.load("a", path)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("options", "count"), [({}, 0), ({"top_logprobs": 0}, 0), ({"top_logprobs": 2}, 2)])
def test_5_03_logprobs_of_chats(real: Served, stream: bool, options: dict[str, int], count: int) -> None:
    wanted = {**GREEDY, "messages": HELLO, "logprobs": True, "extra_body": {"allowed_token_ids": ASCII}, **options}
    client = real.client()
    whole = client.chat.completions.create(**wanted).choices[0]
    text, entries = whole.message.content or "", whole.logprobs.content
    if stream:
        answer = joined(client.chat.completions.create(stream=True, **wanted))[0]
        assert answer.text == text
        streamed = [entry for part in answer.logprobs for entry in part.content]
        assert [(entry.token, entry.bytes) for entry in streamed] == [(entry.token, entry.bytes) for entry in entries]
        entries = streamed
    assert len(entries) == 8
    assert bytes(byte for entry in entries for byte in entry.bytes) == text.encode()
    assert "".join(entry.token for entry in entries) == text
    for entry in entries:
        assert entry.logprob < 0
        assert len(entry.top_logprobs) == count
        assert [top.logprob for top in entry.top_logprobs] == sorted(t.logprob for t in entry.top_logprobs)[::-1]
        assert all(top.bytes == list(top.token.encode()) for top in entry.top_logprobs if top.token.isascii())


def test_5_03_top_logprobs_need_logprobs(server: Served) -> None:
    body = {**GREEDY, "messages": HELLO, "top_logprobs": 2}
    for more in ({}, {"logprobs": False}, {"stream": True}):
        error = error_of(server.http().post("/v1/chat/completions", json={**body, **more}), 400)
        assert "top_logprobs is given without logprobs" in error["message"]
    assert server.client().chat.completions.create(messages=HELLO, **GREEDY).choices[0].logprobs is None


TALKS: dict[str, list[dict[str, Any]]] = {
    "empty": [{"role": "user", "content": "A"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "B"}],
    "null": [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": None, "tool_calls": None},
        {"role": "user", "content": "B"},
    ],
    "missing": [{"role": "user", "content": "A"}, {"role": "assistant"}, {"role": "user", "content": "B"}],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": "A"}]},
        {"role": "assistant", "content": []},
        {"role": "user", "content": [{"type": "text", "text": "B"}]},
    ],
}


def shown(server: Served, messages: list[dict[str, Any]]) -> str:
    """A conversation as the model reads it."""
    tokens = server.http().post("/tokenize", json={"messages": messages}).json()["tokens"]
    text: str = server.http().post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    return text


def answer_to(server: Served, messages: list[dict[str, Any]]) -> Any:
    response = server.http().post("/v1/chat/completions", json={**GREEDY, "messages": messages})
    assert response.status_code == 200, response.text
    body = response.json()
    return body["choices"][0]["message"]["content"], body["usage"]["prompt_tokens"]


@pytest.mark.parametrize("kind", TALKS)
def test_5_04_empty_contents(server: Served, kind: str) -> None:
    assert shown(server, TALKS[kind]) == shown(server, TALKS["empty"])
    assert "None" not in shown(server, TALKS[kind])
    assert answer_to(server, TALKS[kind]) == answer_to(server, TALKS["empty"])


def test_5_04_no_content_beside_calls(tokenizer: Tokenizer) -> None:
    """The template of TINY knows no calls, so that how they are written must be named."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    talk = [dict(message) for message in TALKS["empty"]]
    engine = make_engine(FailingRunner(128, 4), tokenizer, num_blocks=512, vocab_size=tokenizer.vocab_size)
    with served(engine, tool_call_format="hermes") as server:
        answers = []
        for content in (None, ""):
            talk[1] = {"role": "assistant", "content": content, "tool_calls": [call]}
            body = {**GREEDY, "messages": talk, "logprobs": True}
            response = server.http().post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            answers.append(response.json()["choices"][0] | {"prompt": response.json()["usage"]["prompt_tokens"]})
    assert answers[0] == answers[1]


def test_5_04_parts_are_joined(server: Served) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}]
    assert answer_to(server, parts) == answer_to(server, [{"role": "user", "content": "one two"}])
    assert answer_to(server, [{"role": "user", "content": []}]) == answer_to(server, [{"role": "user", "content": ""}])


REFUSES = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% if not loop.first and m['role'] == 'user' and loop.previtem['role'] == 'user' %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['content'] }}{% endfor %}"
)


def with_template(folder: Path, template: str) -> Any:
    tokenizer = load_tokenizer(folder, template)
    return make_engine(FailingRunner(128, 4), tokenizer, num_blocks=64, vocab_size=tokenizer.vocab_size)


def test_5_05_what_a_template_refuses_is_the_clients_error(tiny_model_dir: Path) -> None:
    user, system = {"role": "user", "content": "A"}, {"role": "system", "content": "S"}
    with served(with_template(tiny_model_dir, REFUSES)) as server:
        client = server.client()
        for messages, message in (([system, user], "no system role"), ([user, user], "roles must alternate")):
            for stream in (False, True):
                with pytest.raises(openai.BadRequestError, match=message):
                    client.chat.completions.create(messages=messages, stream=stream, **GREEDY)
        assert client.chat.completions.create(messages=[user], **GREEDY).usage.prompt_tokens == 1


@pytest.mark.parametrize("template", ["{% if %}", "{{ messages[0]['content'].nothing.more }}", "{{ 1 / 0 }}"])
def test_5_05_a_broken_template(tiny_model_dir: Path, template: str) -> None:
    with served(with_template(tiny_model_dir, template)) as server:
        response: httpx.Response = server.http().post("/v1/chat/completions", json={**GREEDY, "messages": HELLO})
        assert "the chat template" in error_of(response, 400)["message"]
        assert server.http().post("/v1/completions", json={**GREEDY, "prompt": PROMPT}).status_code == 200

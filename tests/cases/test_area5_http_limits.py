"""Rows of area 4 of the public bug reports about who leaves, and about what is out of range, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import make_engine
from http_answers import HELLO, PROMPT, error_of, events, joined
from http_server import MODEL, Served, served
from streaming import SlowRunner, settled
from waiting import wait_until

from mlserve import LLM
from mlserve.engine.tokenizer import Tokenizer

GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 8}
LETTERS = list(range(ord("a"), ord("z") + 1))


@pytest.fixture(scope="module")
def real(tiny_model_dir: Path) -> Iterator[Served]:
    """TINY with room for 64 tokens."""
    with served(LLM(str(tiny_model_dir), block_size=4, num_blocks=256, max_model_len=64).engine) as server:
        yield server


Leave = Callable[[Served], None]


def _stream_closed_after_two_chunks(server: Served) -> None:
    stream = server.client().completions.create(prompt=PROMPT, stream=True, **{**GREEDY, "max_tokens": 400})
    for _ in range(2):
        next(stream)
    stream.close()


def _plain_request_closed(server: Served) -> None:
    server.leave_unanswered("/v1/completions", {**GREEDY, "prompt": PROMPT, "max_tokens": 400})


def _several_choices_closed(server: Served) -> None:
    wanted = {**GREEDY, "messages": HELLO, "max_tokens": 400, "n": 3, "temperature": 1.0}
    stream = server.client().chat.completions.create(stream=True, **wanted)
    for _ in range(6):
        next(stream)
    stream.close()


def _several_prompts_closed(server: Served) -> None:
    """More than may run: one of them waits."""
    wanted = {**GREEDY, "prompt": ["a", "b", "c", "d", "e"], "max_tokens": 400}
    server.leave_unanswered("/v1/completions", wanted)
    stream = server.client().completions.create(stream=True, **wanted)
    next(stream)
    stream.close()


@pytest.mark.parametrize(
    "leave",
    [
        _stream_closed_after_two_chunks,
        _plain_request_closed,
        _several_choices_closed,
        _several_prompts_closed,
    ],
)
def test_4_06_who_leaves_takes_everything_along(tokenizer: Tokenizer, leave: Leave) -> None:
    runner = SlowRunner(128, 4)
    engine = make_engine(runner, tokenizer, num_blocks=512, vocab_size=tokenizer.vocab_size, max_num_seqs=4)
    with served(engine) as server:
        for _ in range(20):
            before = len(runner.steps)
            leave(server)
            wait_until(lambda: server.serving.gate.num_requests == 0, 5)
            assert not any(asyncio.run(settled(server.serving.engine, 5)).values())
            assert len(runner.steps) - before < 400  # a whole answer takes more
        server.engine.cache.check()
        assert server.client().completions.create(prompt=PROMPT, **GREEDY).usage.completion_tokens == 8


def test_4_07_empty_and_over_long_prompts(real: Served) -> None:
    http = real.http()
    for chat in (False, True):
        path = "/v1/chat/completions" if chat else "/v1/completions"
        for stream in (False, True):

            def ask(prompt: Any, path: str = path, chat: bool = chat, stream: bool = stream, **more: Any) -> Any:
                content = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
                return http.post(path, json={**GREEDY, **content, "stream": stream, **more})

            if chat:
                error_of(ask("x" * 60), 400)
                continue
            for empty in ("", [], [[]], [""]):
                assert "the prompt is empty" in error_of(ask(empty), 400)["message"]
            for length in (64, 65):
                assert f"{length} tokens, the model takes 64" in error_of(ask(list(range(length))), 400)["message"]
            for wrong in ([5, 320], [5, -1], [5, 2**70]):
                message = error_of(ask(wrong), 400)["message"]
                assert message.startswith(f"prompt token 1 is {wrong[1]}, the vocabulary has 320")
            for bad in ("", "x" * 64):
                assert error_of(ask(["one", bad, "three"]), 400)["message"].startswith("prompt 1: ")
            assert ask(list(range(63))).status_code == 200
            assert ask(" ").status_code == 200
    client = real.client()
    longest = client.completions.create(prompt=list(range(63)), **GREEDY)
    assert (longest.usage.completion_tokens, longest.choices[0].finish_reason) == (1, "length")
    to_the_end = client.completions.create(prompt=list(range(10)), **{**GREEDY, "max_tokens": 64})
    assert (to_the_end.usage.completion_tokens, to_the_end.choices[0].finish_reason) == (54, "length")
    real.wait_until_idle()


def test_4_08_no_tokens_or_one(real: Served) -> None:
    client = real.client()
    for stream in (False, True):
        for more in ({"echo": True}, {}, {"echo": True, "max_tokens": 1}):
            wanted = {**GREEDY, "prompt": PROMPT, "max_tokens": 0, **more}
            whole = client.completions.create(**wanted)
            assert whole.choices[0].text[: len(PROMPT)] == (PROMPT if more.get("echo") else "")
            assert whole.usage.completion_tokens == wanted["max_tokens"]
            assert whole.choices[0].finish_reason == "length"
            if stream:
                *chunks, last = client.completions.create(stream=True, stream_options={"include_usage": True}, **wanted)
                assert joined(chunks)[0].text == whole.choices[0].text
                assert last.usage.completion_tokens == wanted["max_tokens"]
    echoed = client.completions.create(prompt=PROMPT, echo=True, logprobs=1, **{**GREEDY, "max_tokens": 0})
    logprobs = echoed.choices[0].logprobs
    assert (echoed.choices[0].text, "".join(logprobs.tokens)) == (PROMPT, PROMPT)
    assert logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in logprobs.token_logprobs[1:])
    assert logprobs.text_offset == list(range(len(PROMPT)))


def test_4_08_an_echo_with_logprobs_is_not_streamed(real: Served) -> None:
    body = {**GREEDY, "prompt": PROMPT, "echo": True, "logprobs": 1, "stream": True}
    assert "can't be streamed" in error_of(real.http().post("/v1/completions", json=body), 400)["message"]


@pytest.mark.parametrize(
    "wrong",
    [
        '"temperature": NaN',
        '"temperature": Infinity',
        '"temperature": 1e999',
        '"temperature": -1',
        '"temperature": 1e308',
        '"top_p": 0',
        '"top_p": 1.1',
        '"seed": -1',
        '"n": 0',
        '"max_tokens": -1',
        '"logit_bias": {"5": NaN}',
        '"presence_penalty": -2.1',
    ],
)
def test_4_10_numbers_out_of_range(real: Served, wrong: str) -> None:
    client = real.client()
    stream = iter(client.completions.create(prompt=PROMPT, stream=True, **{**GREEDY, "max_tokens": 30}))
    first = next(stream)
    for path, prompt in (("/v1/completions", '"prompt": "x"'), ("/v1/chat/completions", '"messages": [{"role": "u"}]')):
        response = real.http().post(path, content=f"{{{prompt}, {wrong}}}", headers={"Content-Type": "text/json"})
        error_of(response, 400)
        response = real.http().post(
            path, content=f"{{{prompt}, {wrong}}}", headers={"Content-Type": "application/json"}
        )
        assert wrong.split('"')[1] in error_of(response, 400)["message"]
    mate = joined([first, *stream])[0]
    assert mate.text == client.completions.create(prompt=PROMPT, **{**GREEDY, "max_tokens": 30}).choices[0].text


def test_4_10_tiny_and_huge_temperatures(real: Served) -> None:
    client = real.client()
    greedy = client.completions.create(prompt=PROMPT, **GREEDY).choices[0].text
    for how in ({"temperature": 1e-4}, {"temperature": 1e-12}, {"temperature": 1.0, "top_p": 1e-4}):
        assert client.completions.create(prompt=PROMPT, **{**GREEDY, **how}).choices[0].text == greedy
    for temperature in (1e3, 1e6):
        how = {**GREEDY, "temperature": temperature, "logprobs": 1, "extra_body": {"allowed_token_ids": LETTERS}}
        answer = client.completions.create(prompt=PROMPT, **how)
        assert answer.choices[0].text.islower()
    huge = {"top_k": 10**30, "stop_token_ids": [], "min_tokens": 3}
    assert client.completions.create(prompt=PROMPT, extra_body=huge, **GREEDY).choices[0].text == greedy
    sampled = {**GREEDY, "temperature": 1.0, "seed": 2**64 - 1, "max_tokens": 10**30}
    assert client.completions.create(prompt=PROMPT, extra_body={"top_k": 2**63}, **sampled).usage.total_tokens == 64
    assert len(events(real.http().post("/v1/completions", json={**GREEDY, "prompt": "x", "stream": True}))) > 2

"""Rows of the areas 1 and 4 of the public bug reports, as clients of the server meet them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from engines import make_engine
from fakes import ScriptedRunner
from http_answers import HELLO, PROMPT, joined
from http_server import MODEL, Served, served

from mlserve import LLM
from mlserve.engine.engine import Engine
from mlserve.engine.tokenizer import Tokenizer
from mlserve.model.plan import SequenceT, StepPlan, StepResult
from mlserve.request import TokenLogprob

GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 8}
LETTERS = list(range(ord("a"), ord("z") + 1))
# Characters of two and four bytes, one character of seven code points, and an ASCII letter right behind it.
AWKWARD = "ď🌶👨\u200d👩\u200d👧\u200d👦a"


@pytest.fixture(scope="module")
def real(tiny_model_dir: Path) -> Iterator[Served]:
    """TINY with room for 64 tokens."""
    with served(LLM(str(tiny_model_dir), block_size=4, num_blocks=256, max_model_len=64).engine) as server:
        yield server


def cached(answer: Any) -> int:
    tokens: int = answer.usage.prompt_tokens_details.cached_tokens
    return tokens


def test_1_03_prompt_logprobs_on_a_cached_prompt(real: Served, tiny_model_dir: Path) -> None:
    client, prompt = real.client(), list(range(1, 14))
    wanted = {**GREEDY, "prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 1}
    answers = [client.completions.create(**wanted) for _ in range(2)]
    with served(LLM(str(tiny_model_dir), num_blocks=64, enable_prefix_caching=False).engine) as cold:
        answers.append(cold.client().completions.create(**wanted))
    reference = answers[-1].choices[0].logprobs
    for answer in answers:
        logprobs = answer.choices[0].logprobs
        assert logprobs.tokens == reference.tokens
        assert len(logprobs.token_logprobs) == len(logprobs.text_offset) == len(logprobs.top_logprobs) == 14
        assert logprobs.token_logprobs[0] is None
        assert logprobs.top_logprobs[0] is None
        assert logprobs.token_logprobs[1:] == pytest.approx(reference.token_logprobs[1:], abs=1e-4)
        assert all(1 <= len(top) <= 2 for top in logprobs.top_logprobs[1:])
    assert client.completions.create(prompt=PROMPT, **GREEDY).usage.completion_tokens == 8


@pytest.mark.parametrize("stream", [False, True])
def test_1_05_a_salt_reaches_the_cache(real: Served, stream: bool) -> None:
    client = real.client()
    real.engine.reset_prefix_cache()
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}

    def ask(salt: str, chat: bool) -> int:
        how = {**GREEDY, **options, "extra_body": {"cache_salt": salt}}
        if chat:
            answer = client.chat.completions.create(messages=HELLO, **how)
        else:
            answer = client.completions.create(prompt=list(range(1, 13)), **how)
        return cached(list(answer)[-1] if stream else answer)

    assert [ask(salt, chat=False) for salt in ("aaa", "bbb", "aaa")] == [0, 0, 8]
    first, second, third = (ask(salt, chat=True) for salt in ("aaa", "bbb", "aaa"))
    assert (first, second) == (0, 0)
    assert third >= 8


class Pieces:
    """Tokenizer of a scripted output: each token is a whole piece of text."""

    special_ids: frozenset[int] = frozenset()
    chat_template = None

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id].encode()


class Speaker(ScriptedRunner):
    """Tells logprobs too."""

    def run(self, plan: StepPlan[SequenceT]) -> StepResult:
        result = super().run(plan)
        result.logprobs = {row: TokenLogprob(token, -1.0) for row, token in result.token_ids.items()}
        return result


def says(pieces: list[str]) -> Engine:
    return make_engine(Speaker(list(range(len(pieces)))), Pieces(pieces))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pieces", "text", "reason"),
    [(["ABC", "DEF", "G", "HI", "J!"], "ABC", "stop"), (["ABC", "DEF", "G", "X"], "ABCDEFGX", "length")],
)
def test_4_01_stop_strings_over_token_edges(pieces: list[str], text: str, reason: str) -> None:
    wanted = {**GREEDY, "prompt": [1], "max_tokens": len(pieces), "stop": "DEFGHIJ", "logprobs": 0}
    with served(says(pieces)) as server:
        client = server.client()
        whole = client.completions.create(**wanted).choices[0]
        chunks = list(client.completions.create(stream=True, **wanted))
    assert (whole.text, whole.finish_reason) == (text, reason)
    streamed = joined(chunks)[0]
    assert (streamed.text, streamed.reasons) == (text, [reason])
    for tokens in (whole.logprobs.tokens, [token for part in streamed.logprobs for token in part.tokens]):
        assert "".join(tokens) == text
    so_far = ""
    for chunk in chunks:
        so_far += chunk.choices[0].text
        assert text.startswith(so_far)


@pytest.mark.parametrize("cut", [None, *range(1, len(AWKWARD.encode()), 3)])
def test_4_02_characters_split_over_tokens(tokenizer: Tokenizer, cut: int | None) -> None:
    script = list(AWKWARD.encode())
    engine = make_engine(Speaker(script), tokenizer, vocab_size=tokenizer.vocab_size)
    wanted = {**GREEDY, "messages": HELLO, "max_tokens": cut or len(script), "logprobs": True}
    with served(engine) as server:
        client = server.client()
        whole = client.chat.completions.create(**wanted).choices[0]
        chunks = list(client.chat.completions.create(stream=True, **wanted))
    assert whole.message.content == bytes(script[:cut]).decode(errors="replace")
    assert joined(chunks)[0].text == whole.message.content
    assert not any("\ufffd" in (chunk.choices[0].delta.content or "") for chunk in chunks[:-2])
    assert [byte for entry in whole.logprobs.content for byte in entry.bytes] == script[:cut]
    streamed = [entry for part in joined(chunks)[0].logprobs for entry in part.content]
    assert [byte for entry in streamed for byte in entry.bytes] == script[:cut]


def test_4_03_a_prompt_larger_than_the_pool_is_refused_at_once(tiny_model_dir: Path) -> None:
    with served(LLM(str(tiny_model_dir), block_size=4, num_blocks=8, max_model_len=64).engine) as server:
        client = server.client()
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="40 tokens, the whole KV pool holds 32"):
                client.completions.create(prompt=list(range(40)), stream=stream, **GREEDY)
        assert client.completions.create(prompt=[1, 2, 3, 4], **GREEDY).usage.completion_tokens == 8
        full = client.completions.create(prompt=list(range(30)), **{**GREEDY, "max_tokens": 30})
        assert (full.choices[0].finish_reason, full.usage.completion_tokens) == ("length", 2)


@pytest.mark.parametrize("chat", [False, True])
def test_4_05_several_choices_with_a_seed(real: Served, chat: bool) -> None:
    client = real.client()
    how = {"model": MODEL, "n": 3, "seed": 7, "temperature": 1.0, "max_tokens": 12}
    only = {"allowed_token_ids": LETTERS}

    def ask(**more: Any) -> Any:
        extra = {**only, **more.pop("extra", {})}
        if chat:
            return client.chat.completions.create(messages=HELLO, extra_body=extra, **how, **more)
        return client.completions.create(prompt=PROMPT, extra_body=extra, **how, **more)

    def texts(answer: Any) -> list[str]:
        return [choice.message.content if chat else choice.text for choice in answer.choices]

    free = texts(ask())
    assert len(set(free)) == 3
    first = min(set(free[0][2:9]) - set(free[1] + free[2]), key=free[0].index)
    ends_one = {"extra": {"stop_token_ids": [ord(first)]}}
    whole = ask(**ends_one)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert [choice.finish_reason for choice in whole.choices] == ["stop", "length", "length"]
    assert whole.usage.completion_tokens == free[0].index(first) + 1 + 12 + 12
    for _ in range(2):
        *chunks, last = ask(stream=True, stream_options={"include_usage": True}, **ends_one)
        streamed = joined(chunks)
        assert [streamed[index].text for index in range(3)] == texts(whole)
        assert [streamed[index].reasons for index in range(3)] == [["stop"], ["length"], ["length"]]
        assert last.usage.completion_tokens == whole.usage.completion_tokens

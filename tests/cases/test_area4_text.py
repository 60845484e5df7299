"""Public bug reports about streamed text and about sampling in a shared batch."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from comparing import GREEDY, assert_eq, cold
from engines import generate, make_engine
from fakes import ScriptedRunner
from streaming import collect, completed, joined

from mlserve import LLM, FinishReason, RequestOutput, SamplingParams, SamplingParamsError, StreamOutput
from mlserve.engine.async_engine import AsyncEngine

# Characters of two and four bytes, one character of seven code points, and an ASCII letter right behind it.
AWKWARD = "ď🌶👨\u200d👩\u200d👧\u200d👦a"


class Pieces:
    """Tokenizer of a scripted output: each token is a whole piece of text."""

    special_ids: frozenset[int] = frozenset()

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id].encode()


def scripted(pieces: list[str], params: SamplingParams) -> tuple[list[StreamOutput], RequestOutput]:
    """What a model that says these pieces is streamed as, and what it gives in one go."""

    def engine():  # type: ignore[no-untyped-def]
        return make_engine(ScriptedRunner(list(range(len(pieces)))), Pieces(pieces))

    params = replace(params, max_tokens=len(pieces))
    with AsyncEngine(engine()) as streaming:
        streamed = asyncio.run(collect(streaming, "r", [1], params))
    return streamed, generate(engine(), [1], params)


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "reason"),
    [
        (["ABC", "DEF", "G", "HI", "J!"], ["DEFGHIJ"], "ABC", FinishReason.STOP),
        (["ABC", "DEF", "G", "X"], ["DEFGHIJ"], "ABCDEFGX", FinishReason.LENGTH),
        (["ABC", "DEF", "G"], ["DEFGHIJ"], "ABCDEFG", FinishReason.LENGTH),  # ends while it may still be one
        (["ABC", "DEF", "G", "HI", "J!"], ["CDE"], "AB", FinishReason.STOP),  # inside two tokens
        (["ABC", "DEF", "G", "HI", "J!"], ["J!", "HIJ"], "ABCDEFG", FinishReason.STOP),  # the first to be complete
        (["AB", "AB", "AC", "x"], ["ABAC"], "AB", FinishReason.STOP),  # begins again within itself
    ],
)
def test_4_01_stop_strings_over_token_edges(
    pieces: list[str], stop: list[str], text: str, reason: FinishReason
) -> None:
    streamed, whole = scripted(pieces, SamplingParams(stop=stop))
    for output in (whole, completed(streamed)):
        assert output.outputs[0].text == text
        assert output.outputs[0].finish_reason is reason
    assert "".join(output.text for output in streamed) == text
    assert all(text.startswith("".join(o.text for o in streamed[:i])) for i in range(len(streamed)))


def test_4_01_a_stop_string_can_be_kept() -> None:
    params = SamplingParams(stop="DEFGHIJ", include_stop_str_in_output=True)
    streamed, whole = scripted(["ABC", "DEF", "G", "HI", "J!"], params)
    assert joined(streamed)[0][0] == whole.outputs[0].text == "ABCDEFGHIJ"
    assert whole.outputs[0].stop_reason == "DEFGHIJ"


@pytest.mark.parametrize("cut", [None, *range(1, len(AWKWARD.encode()))])
def test_4_02_characters_split_over_tokens(tiny_model_dir: Path, cut: int | None) -> None:
    script = list(AWKWARD.encode())
    llm = LLM(str(tiny_model_dir), block_size=4, num_blocks=64)
    llm.engine.runner = ScriptedRunner(script)
    params = SamplingParams(max_tokens=cut or len(script))
    (whole,) = llm.generate([1], params)
    streamed = list(llm.stream([1], params))
    assert completed(streamed).outputs == whole.outputs
    assert joined(streamed) == {0: (whole.outputs[0].text, script[:cut])}
    assert whole.outputs[0].text == bytes(script[:cut]).decode(errors="replace")
    assert not any("\ufffd" in output.text for output in streamed[:-1])
    if cut is None:
        assert whole.outputs[0].text == AWKWARD


SEEDED = SamplingParams(max_tokens=16, temperature=0.8, seed=42, logprobs=0)


@pytest.mark.parametrize(
    "mate",
    [
        None,
        replace(SEEDED, seed=1),
        replace(SEEDED, seed=None),
        replace(SEEDED, seed=None, temperature=0.0),
        replace(SEEDED, seed=None, top_k=3, top_p=0.5, max_tokens=5),
    ],
    ids=["none", "seeded", "unseeded", "greedy", "restricted"],
)
def test_4_04_a_seed_gives_the_same_ids_in_any_company(tiny_model_dir: Path, mate: SamplingParams | None) -> None:
    prompt = list(range(1, 8))
    reference = cold(tiny_model_dir, prompt, SEEDED)
    assert reference.outputs[0].token_ids != cold(tiny_model_dir, prompt).outputs[0].token_ids
    llm = LLM(str(tiny_model_dir), block_size=4, num_blocks=64)
    for position in range(4):
        prompts = [list(range(20 + i, 25 + 2 * i)) for i in range(3 if mate else 0)]
        params = [mate] * len(prompts)
        prompts.insert(position, prompt)
        params.insert(position, SEEDED)
        outputs = llm.generate(prompts, params)
        assert_eq(outputs[min(position, len(prompts) - 1)], reference)


def test_4_05_several_choices_with_a_seed(tiny_model_dir: Path) -> None:
    prompt = list(range(1, 11))
    free = SamplingParams(n=3, seed=7, temperature=1.0, max_tokens=12)
    choices = [o.token_ids for o in cold(tiny_model_dir, prompt, free).outputs]
    assert len({tuple(ids) for ids in choices}) == 3
    ends_one = next(token for token in choices[0][2:9] if token not in {*choices[1], *choices[2]})
    params = replace(free, stop_token_ids=[ends_one])

    async def twice(engine: AsyncEngine) -> list[list[StreamOutput]]:
        return [await collect(engine, name, prompt, params) for name in ("first", "second")]

    with AsyncEngine(LLM(str(tiny_model_dir), block_size=4, num_blocks=64).engine) as engine:
        runs = asyncio.run(twice(engine))
    whole = cold(tiny_model_dir, prompt, params)
    for streamed in runs:
        assert joined(streamed) == {o.index: (o.text, o.token_ids) for o in whole.outputs}
        assert [o.finish_reason for o in completed(streamed).outputs] == [
            FinishReason.STOP, FinishReason.LENGTH, FinishReason.LENGTH,
        ]  # fmt: skip
        assert sorted(o.index for o in streamed if o.finish_reason) == [0, 1, 2]
        ids = [o.token_ids for o in completed(streamed).outputs]
        assert ids == [choices[0][: choices[0].index(ends_one) + 1], choices[1], choices[2]]
        assert sum(len(o.token_ids) for o in streamed) == sum(map(len, ids))


@pytest.mark.parametrize(
    "params",
    [
        replace(GREEDY, temperature=1e-4, seed=3),
        replace(GREEDY, temperature=1e-12, seed=3),
        replace(GREEDY, temperature=1.0, top_p=1e-4, seed=3),
    ],
    ids=["1e-4", "1e-12", "top_p"],
)
def test_4_10_tiny_temperatures_are_greedy(tiny_model_dir: Path, params: SamplingParams) -> None:
    prompts = [list(range(1, 8)), list(range(50, 62))]
    llm = LLM(str(tiny_model_dir), block_size=4, num_blocks=64)
    tiny, mate = llm.generate(prompts, [params, GREEDY])
    assert_eq(tiny, cold(tiny_model_dir, prompts[0]))
    assert_eq(mate, cold(tiny_model_dir, prompts[1]))


@pytest.mark.parametrize(
    "wrong", [{"temperature": t} for t in (float("nan"), float("inf"), -1.0)] + [{"top_p": p} for p in (0.0, 1.1)]
)
def test_4_10_others_are_refused_while_a_mate_runs(tiny_model_dir: Path, wrong: dict[str, float]) -> None:
    llm = LLM(str(tiny_model_dir), block_size=4, num_blocks=64)
    stream = llm.stream([1, 2, 3], GREEDY)
    first = next(stream)
    (name,) = wrong
    with pytest.raises(SamplingParamsError, match=f"^{name} is "):
        llm.generate([4, 5], SamplingParams(**wrong))
    assert_eq(completed([first, *stream]), cold(tiny_model_dir, [1, 2, 3]))

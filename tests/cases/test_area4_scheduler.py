"""Public bug reports about the scheduler and the engine. Rows on text and sampling are in test_area4_text.py."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from comparing import GREEDY, assert_eq, cold
from engines import make_engine, run, step, submit
from fakes import CountingRunner
from streaming import VOCAB, SlowRunner, collect, completed, joined, settled

from mlserve import LLM, CapacityError, FinishReason, PromptError, SamplingParams
from mlserve.engine.async_engine import AsyncEngine
from mlserve.engine.tokenizer import Tokenizer

LONG = SamplingParams(max_tokens=400)


def small_pool(model: Path) -> LLM:
    """Room for 32 tokens, under a model that takes 64."""
    return LLM(str(model), block_size=4, num_blocks=8, max_model_len=64)


def test_4_03_a_prompt_larger_than_the_pool_is_refused_at_once(tiny_model_dir: Path) -> None:
    llm = small_pool(tiny_model_dir)
    with pytest.raises(CapacityError, match="40 tokens, the whole KV pool holds 32"):
        llm.generate(list(range(40)), GREEDY)
    assert_eq(llm.generate([1, 2, 3, 4], GREEDY)[0], cold(tiny_model_dir, [1, 2, 3, 4]))


def test_4_03_and_holds_up_nobody_who_runs(tiny_model_dir: Path) -> None:
    async def main(engine: AsyncEngine) -> None:
        small = asyncio.create_task(collect(engine, "small", [1, 2, 3, 4], GREEDY))
        with pytest.raises(CapacityError):
            await collect(engine, "large", list(range(40)), GREEDY)
        assert_eq(completed(await small), cold(tiny_model_dir, [1, 2, 3, 4]))

    with AsyncEngine(small_pool(tiny_model_dir).engine) as engine:
        asyncio.run(main(engine))


@pytest.mark.parametrize("count", [1, 2])
def test_4_03_an_answer_ends_where_the_pool_does(tiny_model_dir: Path, count: int) -> None:
    """Two of them preempt each other and still end; one never preempts itself."""
    llm = small_pool(tiny_model_dir)
    prompts = [list(range(i, i + 30)) for i in range(count)]
    outputs = llm.generate(prompts, replace(GREEDY, max_tokens=30))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].finish_reason is FinishReason.LENGTH
        assert_eq(output, cold(tiny_model_dir, prompt, replace(GREEDY, max_tokens=2)))
    assert count > 1 or outputs[0].metrics.preemptions == 0


async def _closed_after_two_outputs(engine: AsyncEngine, name: str) -> None:
    stream = engine.stream(name, list(range(10)), LONG)
    for _ in range(2):
        await anext(stream)
    await stream.aclose()


async def _cancelled_after_50_ms(engine: AsyncEngine, name: str) -> None:
    task = asyncio.create_task(collect(engine, name, list(range(10)), LONG))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _several_sequences_closed(engine: AsyncEngine, name: str) -> None:
    stream = engine.stream(name, list(range(10)), replace(LONG, n=3, temperature=1.0))
    while (await anext(stream)).index != 2:
        pass
    await stream.aclose()


async def _closed_while_waiting(engine: AsyncEngine, name: str) -> None:
    """Four at once where two may run: with somebody else there, two or three of them wait."""
    tasks = [asyncio.create_task(collect(engine, f"{name}.{i}", [i, 1], LONG)) for i in range(4)]
    while await engine.call(lambda inner: len(inner.scheduler.running)) < 2:
        await asyncio.sleep(0)
    assert await engine.call(lambda inner: len(inner.scheduler.waiting)) in (2, 3)
    for task in reversed(tasks):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(
    ("leave", "max_num_seqs"),
    [
        (_closed_after_two_outputs, 8),
        (_cancelled_after_50_ms, 8),
        (_several_sequences_closed, 8),
        (_closed_while_waiting, 2),
    ],
)
def test_4_06_who_leaves_takes_everything_along(
    tokenizer: Tokenizer, leave: Callable[[AsyncEngine, str], Awaitable[None]], max_num_seqs: int
) -> None:
    async def main(engine: AsyncEngine) -> None:
        bystander = asyncio.create_task(collect(engine, "bystander", [9, 8, 7], SamplingParams(max_tokens=30)))
        for number in range(20):
            await leave(engine, str(number))
            if number:  # the bystander has gone
                state = await settled(engine, seconds=1)
                assert not any(state.values()), state
            else:
                outputs = await bystander
        alone = await collect(engine, "alone", [9, 8, 7], SamplingParams(max_tokens=30))
        assert joined(outputs) == joined(alone)

    inner = make_engine(SlowRunner(VOCAB, 4), tokenizer, num_blocks=512, max_num_seqs=max_num_seqs)
    with AsyncEngine(inner) as engine:
        asyncio.run(main(engine))
    inner.cache.check()


def test_4_07_empty_and_over_long_prompts(tiny_model_dir: Path) -> None:
    llm = LLM(str(tiny_model_dir), block_size=4, num_blocks=64, max_model_len=64)
    for prompt in ("", []):
        with pytest.raises(PromptError, match="the prompt is empty"):
            llm.generate(prompt, GREEDY)
    for length in (64, 65):
        with pytest.raises(PromptError, match=f"the prompt has {length} tokens, the model takes 64"):
            llm.generate(list(range(length)), GREEDY)
    (longest,) = llm.generate(list(range(63)), GREEDY)
    assert len(longest.outputs[0].token_ids) == 1
    assert longest.outputs[0].finish_reason is FinishReason.LENGTH
    (to_the_end,) = llm.generate(list(range(10)), replace(GREEDY, max_tokens=64))
    assert len(to_the_end.outputs[0].token_ids) == 54
    assert to_the_end.outputs[0].finish_reason is FinishReason.LENGTH
    for blank in (" ", "\n\t "):
        assert_eq(llm.generate(blank, GREEDY)[0], cold(tiny_model_dir, list(blank.encode())))


@pytest.mark.parametrize("bad", ["", [], [5, 320], [-1], list(range(64))])
def test_4_07_one_bad_prompt_of_three(tiny_model_dir: Path, bad: str | list[int]) -> None:
    llm = LLM(str(tiny_model_dir), block_size=4, num_blocks=64, max_model_len=64)
    with pytest.raises(PromptError, match=r"^prompt 1: "):
        llm.generate([[1, 2, 3], bad, [4, 5]], GREEDY)
    assert llm.cache_stats().query_tokens == 0  # nothing ran
    assert_eq(llm.generate([1, 2, 3], GREEDY)[0], cold(tiny_model_dir, [1, 2, 3]))


def test_4_08_no_tokens_wanted(tiny_model_dir: Path) -> None:
    llm = LLM(str(tiny_model_dir), block_size=4, num_blocks=64)
    prompt = "Your answer: Yes"
    for params in (SamplingParams(max_tokens=0), SamplingParams(max_tokens=0, logprobs=1, prompt_logprobs=1)):
        for output in (llm.generate(prompt, params)[0], completed(list(llm.stream(prompt, params)))):
            assert (output.prompt, output.finished) == (prompt, True)
            assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [])
            assert output.outputs[0].finish_reason is FinishReason.LENGTH
            if params.prompt_logprobs is None:
                assert output.prompt_logprobs is None
            else:
                assert output.prompt_logprobs is not None
                assert len(output.prompt_logprobs) == len(prompt)
                assert_eq(output, cold(tiny_model_dir, list(prompt.encode()), params))


def test_4_08_one_token_wanted(tiny_model_dir: Path) -> None:
    llm = LLM(str(tiny_model_dir), block_size=4, num_blocks=64)
    params = SamplingParams(max_tokens=1, logprobs=1, prompt_logprobs=1)
    (output,) = llm.generate("Your answer: Yes", params)
    assert len(output.outputs[0].token_ids) == 1
    assert_eq(output, cold(tiny_model_dir, list(b"Your answer: Yes"), params))


@pytest.mark.parametrize("caching", [True, False])
def test_4_09_preemption_changes_nothing(tiny_model_dir: Path, caching: bool) -> None:
    letters = tuple(range(ord("a"), ord("z") + 1))
    penalised = SamplingParams(
        max_tokens=16, frequency_penalty=1.0, temperature=0.8, logprobs=0, allowed_token_ids=letters
    )
    prompts = [[10 * i + j for j in range(8)] for i in range(4)]
    greedy = replace(penalised, temperature=0.0)
    text = cold(tiny_model_dir, prompts[3], greedy).outputs[0].text
    params = [*(replace(penalised, seed=i) for i in range(3)), replace(greedy, stop=text[9:12])]
    references = [cold(tiny_model_dir, prompt, p) for prompt, p in zip(prompts, params, strict=True)]
    assert [len(r.outputs[0].token_ids) for r in references] == [16, 16, 16, 12]

    async def main(engine: AsyncEngine) -> None:
        streams = [collect(engine, str(i), prompt, params[i]) for i, prompt in enumerate(prompts)]
        results = await asyncio.gather(*streams)
        assert sum(completed(outputs).metrics.preemptions for outputs in results) > 0
        for outputs, reference in zip(results, references, strict=True):
            assert_eq(completed(outputs), reference)
            assert joined(outputs) == {0: (reference.outputs[0].text, reference.outputs[0].token_ids)}

    llm = LLM(str(tiny_model_dir), block_size=4, num_blocks=10, enable_prefix_caching=caching)
    with AsyncEngine(llm.engine) as engine:
        asyncio.run(main(engine))


def test_4_11_a_large_request_neither_stops_the_others_nor_starves(tokenizer: Tokenizer) -> None:
    """Pool of 10: one that runs holds 6, the first that waits needs 8, the next ones 1 each."""
    engine = make_engine(CountingRunner(VOCAB), tokenizer, num_blocks=10, max_skips=16)
    submit(engine, "runs", list(range(21)), SamplingParams(max_tokens=3))
    first_token, ended = {}, {}
    flow = 0
    for now in range(60):
        if now == 1:
            submit(engine, "large", list(range(100, 130)), SamplingParams(max_tokens=2))
        if now >= 1 and "large" not in ended:
            submit(engine, f"small{flow}", [200, flow], SamplingParams(max_tokens=2))
            flow += 1
        for output in step(engine):
            first_token.setdefault(output.request_id, now)
            if output.completed is not None:
                ended[output.request_id] = now
    assert first_token["small0"] < ended["runs"]
    assert first_token["large"] <= 1 + 16 + 2  # overtaken sixteen times, one a step; then whoever runs has two tokens
    assert first_token["large"] > ended["runs"]
    run(engine)
    assert {*ended} == {"runs", "large", *(f"small{i}" for i in range(flow))}

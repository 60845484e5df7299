"""Public bug reports about prefix caching, each on the tiny model. Rows on keys alone are in tests/cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from comparing import GREEDY, assert_eq, cold

from mlserve import LLM, FinishReason, SamplingParams
from mlserve.cache.block_pool import BlockPool
from mlserve.model.plan import StepPlan


@pytest.mark.parametrize(("block_size", "length"), [(4, 8), (1, 1), (1, 5), (16, 16), (16, 32)])
def test_1_01_a_fully_cached_prompt_still_computes_its_last_token(
    tiny_model_dir: Path, block_size: int, length: int
) -> None:
    prompt, params = list(range(1, length + 1)), replace(GREEDY, max_tokens=3)
    llm = LLM(str(tiny_model_dir), block_size=block_size, num_blocks=64)
    llm.generate(prompt, params)
    again = llm.generate(prompt, params)[0]
    assert again.metrics.cached_tokens <= length - 1
    assert again.metrics.cached_tokens == (length - 1) // block_size * block_size
    assert_eq(again, cold(tiny_model_dir, prompt, params))


def test_1_03_prompt_logprobs_on_a_cached_prompt(tiny_model_dir: Path) -> None:
    prompt = list(range(1, 14))
    llm = LLM(str(tiny_model_dir), block_size=4, num_blocks=64)
    llm.generate(prompt, GREEDY)
    for params in (replace(GREEDY, prompt_logprobs=1), SamplingParams(max_tokens=1, logprobs=1, prompt_logprobs=1)):
        output = llm.generate(prompt, params)[0]
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == 13
        assert all(len(entry.top) == 1 for entry in output.prompt_logprobs[1:] if entry)
        assert_eq(output, cold(tiny_model_dir, prompt, params))
    assert_eq(llm.generate(prompt, GREEDY)[0], cold(tiny_model_dir, prompt))


def test_1_03_prompt_logprobs_in_chunks(tiny_model_dir: Path) -> None:
    prompt, params = list(range(1, 30)), replace(GREEDY, prompt_logprobs=2)
    llm = LLM(str(tiny_model_dir), block_size=4, num_blocks=64, max_num_batched_tokens=6, max_num_seqs=4)
    others = [list(range(50 + i, 60 + i)) for i in range(3)]
    outputs = llm.generate([prompt, *others], [params, GREEDY, GREEDY, params])
    assert_eq(outputs[0], cold(tiny_model_dir, prompt, params))
    assert_eq(outputs[3], cold(tiny_model_dir, others[2], params))


@pytest.mark.parametrize("swapped", [False, True])
def test_1_04_hits_and_misses_in_one_prefill_batch(tiny_model_dir: Path, swapped: bool) -> None:
    llm = LLM(str(tiny_model_dir), block_size=4, num_blocks=64)
    llm.generate(list(range(1, 9)), GREEDY)
    prompts = [[*range(1, 9), 20, 21], list(range(100, 112))]
    prompts = prompts[::-1] if swapped else prompts
    outputs = llm.generate(prompts, GREEDY)
    assert sorted(output.metrics.cached_tokens for output in outputs) == [0, 8]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_eq(output, cold(tiny_model_dir, prompt))


def test_1_05_a_salt_reaches_the_cache(tiny_model_dir: Path) -> None:
    prompt = list(range(1, 13))
    llm = LLM(str(tiny_model_dir), block_size=4, num_blocks=64)
    cached = [llm.generate(prompt, GREEDY, cache_salt=salt)[0].metrics.cached_tokens for salt in ("aaa", "bbb", "aaa")]
    assert cached == [0, 0, 8]
    messages = [{"role": "user", "content": "a fairly long question, many blocks of it"}]
    cached = [llm.chat(messages, GREEDY, cache_salt=salt)[0].metrics.cached_tokens for salt in ("aaa", "bbb", "aaa")]
    assert cached[:2] == [0, 0]
    assert cached[2] >= 8
    streamed = []
    for salt in ("ccc", "ddd", "ccc"):
        last = [output.completed for output in llm.stream(prompt, GREEDY, cache_salt=salt)][-1]
        assert last is not None
        streamed.append(last.metrics.cached_tokens)
    assert streamed == [0, 0, 8]


def test_1_07_duplicates_neither_leak_nor_keep_stale_names(tiny_model_dir: Path) -> None:
    llm = LLM(str(tiny_model_dir), block_size=4, num_blocks=8)
    prompt = list(range(1, 9))
    llm.generate([prompt, prompt], GREEDY)
    llm.engine.cache.check()
    for i in range(200):
        llm.generate([(7 * i + j) % 250 + 1 for j in range(8)], replace(GREEDY, max_tokens=1))
        assert llm.cache_stats().num_cached <= 8
        llm.engine.cache.check()
    assert_eq(llm.generate(prompt, GREEDY)[0], cold(tiny_model_dir, prompt))
    assert llm.cache_stats().num_referenced == 0
    llm.reset_prefix_cache()
    assert llm.cache_stats().num_cached == 0


def test_1_08_no_name_for_kv_that_was_never_written(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(tiny_model_dir), block_size=4, num_blocks=6)
    prompt = list(range(1, 17))
    params = replace(GREEDY, max_tokens=4)

    def fails(plan: StepPlan) -> None:
        raise RuntimeError("before any write")

    with monkeypatch.context() as patched:
        patched.setattr(llm.engine.runner, "run", fails)
        failed = llm.generate(prompt, params)[0]
    assert failed.outputs[0].finish_reason is FinishReason.ERROR
    assert "before any write" in (failed.error or "")
    assert llm.cache_stats().num_cached == 0
    again = llm.generate(prompt, params)[0]
    assert again.metrics.cached_tokens == 0
    assert_eq(again, cold(tiny_model_dir, prompt, params))


@pytest.mark.parametrize("warm", [0, 4, 8, 12, 16])
def test_1_09_chunks_that_begin_before_inside_and_after_the_cached_prefix(
    tiny_model_dir: Path, warm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = list(range(1, 19))
    llm = LLM(str(tiny_model_dir), block_size=4, num_blocks=64, max_num_batched_tokens=6, max_num_seqs=2)
    if warm:
        llm.generate([*prompt[:warm], 200], replace(GREEDY, max_tokens=1))
    computed, run = [], llm.engine.runner.run

    def spy(plan: StepPlan) -> object:
        for sequence, query_len in zip(plan.sequences, plan.query_lens, strict=True):
            computed.extend(range(sequence.num_computed, sequence.num_computed + query_len))
        return run(plan)

    monkeypatch.setattr(llm.engine.runner, "run", spy)
    output = llm.generate(prompt, GREEDY)[0]
    assert output.metrics.cached_tokens == warm
    assert computed == list(range(warm, 18 + 7))  # every token once, none of the cached ones
    assert_eq(output, cold(tiny_model_dir, prompt))


def test_1_10_the_deepest_block_goes_first(tiny_model_dir: Path) -> None:
    llm = LLM(str(tiny_model_dir), block_size=4, num_blocks=6)
    prompt, one = list(range(1, 17)), replace(GREEDY, max_tokens=1)
    llm.generate(prompt, one)
    llm.generate(list(range(100, 111)), one)
    assert llm.generate(prompt, one)[0].metrics.cached_tokens == 12
    llm.engine.cache.check()


def test_1_02_collisions_cost_a_miss_not_a_wrong_answer(tiny_model_dir: Path) -> None:
    """A hash that maps everything to one key: nothing but the very first block can be named, and answers stay right."""

    class Constant:
        name = "constant"

        def digest(self, data: bytes | memoryview) -> bytes:
            return bytes(16)

    llm = LLM(str(tiny_model_dir), block_size=4, num_blocks=64, block_hash=Constant())
    for prompt in (list(range(1, 13)), list(range(2, 14)), list(range(1, 13)), [*range(1, 9), 77, 78]):
        assert_eq(llm.generate(prompt, GREEDY)[0], cold(tiny_model_dir, prompt))
    assert isinstance(llm.engine.cache.pool, BlockPool)

"""COLD and EQ of the public bug reports: a request on a fresh engine without caching, alone; and equality with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlserve import LLM, CompletionOutput, RequestOutput, SamplingParams, TokenLogprob

TOLERANCE = 1e-4
GREEDY = SamplingParams(max_tokens=8, logprobs=0)


def cold(
    model: Path,
    prompt: Sequence[int],
    params: SamplingParams = GREEDY,
    *,
    adapter: Path | None = None,
    **options: Any,
) -> RequestOutput:
    """The request on a fresh engine, prefix caching off, batch of one, in a pool that is never short."""
    adapters = {} if adapter is None else {"only": adapter}
    llm = LLM(str(model), adapters=adapters, enable_prefix_caching=False, num_blocks=256, **options)
    name = None if adapter is None else "only"
    output = llm.generate(list(prompt), replace(params, logprobs=params.logprobs or 0), adapter=name)[0]
    assert output.metrics.cached_tokens == 0
    return output


def assert_eq(output: RequestOutput, reference: RequestOutput) -> None:
    """Same token ids, and every logprob within 1e-4. Text alone would hide differences."""
    assert output.finished
    assert len(output.outputs) == len(reference.outputs)
    for mine, its in zip(output.outputs, reference.outputs, strict=True):
        assert_completion_eq(mine, its)
    if reference.prompt_logprobs is not None:
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert_logprobs_eq(output.prompt_logprobs[1:], reference.prompt_logprobs[1:])


def assert_completion_eq(mine: CompletionOutput, its: CompletionOutput) -> None:
    assert mine.token_ids == its.token_ids
    assert mine.text == its.text
    assert mine.finish_reason == its.finish_reason
    assert mine.logprobs is not None
    assert its.logprobs is not None
    assert_logprobs_eq(mine.logprobs, its.logprobs)


def assert_logprobs_eq(mine: Sequence[TokenLogprob | None], its: Sequence[TokenLogprob | None]) -> None:
    assert len(mine) == len(its)
    for a, b in zip(mine, its, strict=True):
        assert a is not None
        assert b is not None
        assert a.token_id == b.token_id
        assert abs(a.logprob - b.logprob) <= TOLERANCE

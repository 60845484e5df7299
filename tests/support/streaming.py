"""Reading streams of the engine behind many callers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from fakes import ContextRunner

from mlserve.engine.async_engine import AsyncEngine
from mlserve.engine.engine import Engine
from mlserve.model.plan import SequenceT, StepPlan, StepResult
from mlserve.request import RequestOutput, SamplingParams, StreamOutput

VOCAB = 256


class SlowRunner(ContextRunner):
    """Takes a millisecond a step, so that requests are still running when a test does something about them."""

    def run(self, plan: StepPlan[SequenceT]) -> StepResult:
        time.sleep(0.001)
        return super().run(plan)


async def collect(
    engine: AsyncEngine, request_id: str, prompt: str | Sequence[int], params: SamplingParams, **how: object
) -> list[StreamOutput]:
    """All outputs of one request."""
    return [output async for output in engine.stream(request_id, prompt, params, **how)]


def joined(outputs: Iterable[StreamOutput]) -> dict[int, tuple[str, list[int]]]:
    """Text and token ids of each sequence of a streamed request; its last output must be the complete one."""
    result: dict[int, tuple[str, list[int]]] = {}
    for output in outputs:
        text, token_ids = result.get(output.index, ("", []))
        result[output.index] = (text + output.text, token_ids + output.token_ids)
    return result


def completed(outputs: Sequence[StreamOutput]) -> RequestOutput:
    """The whole request, which its very last output and no other brings."""
    assert [output.completed is not None for output in outputs] == [False] * (len(outputs) - 1) + [True]
    whole = outputs[-1].completed
    assert whole is not None
    return whole


def live_state(engine: Engine) -> dict[str, int]:
    """What an engine holds for requests; all zero when it is idle."""
    return {
        "requests": len(engine._requests),
        "outputs": len(engine._outputs),
        "detokenizers": len(engine._outputs._detokenizers),
        "waiting": len(engine.scheduler.waiting),
        "running": len(engine.scheduler.running),
        "blocks": engine.cache.stats().num_referenced,
        "unsent": len(engine._unsent),
    }


async def settled(engine: AsyncEngine, seconds: float = 1.0) -> dict[str, int]:
    """What the engine and its listeners hold once nothing changes any more, or after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        is_last = time.monotonic() > deadline
        state = await engine.call(lambda inner: live_state(inner) | {"listeners": len(engine._listeners)})
        assert isinstance(state, dict)
        if is_last or not any(state.values()):
            return state

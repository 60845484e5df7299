"""The engine behind many callers: what one of them does, or suffers, reaches no other."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from engines import make_engine
from streaming import VOCAB, SlowRunner, collect, completed, joined, settled

from mlserve.engine.async_engine import AsyncEngine
from mlserve.engine.engine import Engine
from mlserve.engine.tokenizer import Tokenizer
from mlserve.errors import MlserveError, PromptError, RequestError, SamplingParamsError, StepError
from mlserve.model.plan import SequenceT, StepPlan, StepResult
from mlserve.request import FinishReason, SamplingParams

POISON = 66
LONG = SamplingParams(max_tokens=400)


class PoisonedRunner(SlowRunner):
    """Raises whenever a sequence that starts with the poison is in the step."""

    def run(self, plan: StepPlan[SequenceT]) -> StepResult:
        if any(sequence.token_ids[0] == POISON for sequence in plan.sequences):
            raise RuntimeError("boom")
        return super().run(plan)


@pytest.fixture
def engine(tokenizer: Tokenizer) -> Iterator[AsyncEngine]:
    with AsyncEngine(make_engine(PoisonedRunner(VOCAB, 4), tokenizer, num_blocks=256)) as engine:
        yield engine


def expected(prompt: list[int], count: int) -> list[int]:
    model, context = SlowRunner(VOCAB, 4), list(prompt)
    for _ in range(count):
        context.append(model.next_token(context))
    return context[len(prompt) :]


def test_concurrent_streams_equal_their_solo_runs(engine: AsyncEngine) -> None:
    prompts = {f"r{i}": list(range(i, 3 * i + 2)) for i in range(12)}

    async def main() -> dict[str, Any]:
        streams = [
            collect(engine, name, prompt, SamplingParams(max_tokens=5 + len(prompt)))
            for name, prompt in prompts.items()
        ]
        return dict(zip(prompts, await asyncio.gather(*streams), strict=True))

    for name, outputs in asyncio.run(main()).items():
        prompt = prompts[name]
        ids = expected(prompt, 5 + len(prompt))
        whole = completed(outputs)
        assert all(output.request_id == name for output in outputs)
        assert joined(outputs) == {0: (whole.outputs[0].text, ids)}
        assert whole.outputs[0].token_ids == ids
        assert whole.outputs[0].finish_reason is outputs[-1].finish_reason is FinishReason.LENGTH


def test_each_of_several_sequences_ends_once(engine: AsyncEngine) -> None:
    params = SamplingParams(n=3, max_tokens=6, temperature=1.0, seed=3)
    outputs = asyncio.run(collect(engine, "r", list(range(9)), params))
    whole = completed(outputs)
    assert sorted(o.index for o in outputs if o.finish_reason) == [0, 1, 2]
    assert joined(outputs) == {o.index: (o.text, o.token_ids) for o in whole.outputs}


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ([], SamplingParams(), PromptError),
        ([1, VOCAB], SamplingParams(), PromptError),
        ([1], SamplingParams(stop_token_ids=[VOCAB]), SamplingParamsError),
        ("\ud800", SamplingParams(), PromptError),
    ],
)
def test_a_refused_request_raises_before_its_first_output(
    engine: AsyncEngine, prompt: Any, params: SamplingParams, error: type[Exception]
) -> None:
    async def main() -> list[Any]:
        with pytest.raises(error):
            await anext(engine.stream("bad", prompt, params))
        return await collect(engine, "bad", [1, 2], SamplingParams(max_tokens=2))  # its id isn't taken

    assert completed(asyncio.run(main())).outputs[0].token_ids == expected([1, 2], 2)


def test_an_id_in_use_is_refused_and_its_owner_goes_on(engine: AsyncEngine) -> None:
    async def main() -> list[Any]:
        stream = engine.stream("r", [1, 2], SamplingParams(max_tokens=20))
        outputs = [await anext(stream)]
        with pytest.raises(RequestError, match="'r' is in use"):
            await collect(engine, "r", [5], SamplingParams())
        return outputs + [output async for output in stream]

    assert completed(asyncio.run(main())).outputs[0].token_ids == expected([1, 2], 20)


def test_an_id_can_be_used_again_at_once_after_leaving(engine: AsyncEngine) -> None:
    async def main() -> None:
        for count in range(2, 22):
            stream = engine.stream("r", [7, 8, 9], LONG)
            await anext(stream)
            await stream.aclose()
            outputs = await collect(engine, "r", [1, 2], SamplingParams(max_tokens=count))
            assert completed(outputs).outputs[0].token_ids == expected([1, 2], count)
        assert not any((await settled(engine)).values())

    asyncio.run(main())


def test_a_request_that_fails_in_the_model_fails_alone(engine: AsyncEngine) -> None:
    async def main() -> list[Any]:
        good = (collect(engine, f"good{i}", [i, i + 1], SamplingParams(max_tokens=9)) for i in range(3))
        return await asyncio.gather(*good, collect(engine, "bad", [POISON, 1], SamplingParams(max_tokens=9)))

    *good, bad = asyncio.run(main())
    for i, outputs in enumerate(good):
        assert completed(outputs).outputs[0].token_ids == expected([i, i + 1], 9)
    assert completed(bad).outputs[0].finish_reason is FinishReason.ERROR
    assert completed(bad).error == bad[-1].error == "the model raised RuntimeError while it ran this request: boom"


@pytest.mark.parametrize("part", ["scheduler.plan", "scheduler.commit", "_outputs.process"])
def test_a_defect_outside_the_model_fails_what_is_live_and_nothing_later(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    owner, name = part.split(".")

    def fails(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    def break_it(inner: Engine) -> None:
        monkeypatch.setattr(getattr(inner, owner), name, fails)

    async def main() -> None:
        streams = [engine.stream(f"r{i}", [i, 1], SamplingParams(n=2, max_tokens=300)) for i in range(3)]
        for stream in streams:
            await anext(stream)
        await engine.call(break_it)
        for stream in streams:
            with pytest.raises(StepError, match="the engine failed: a defect"):
                async for _ in stream:
                    pass
        monkeypatch.undo()
        assert not any((await settled(engine)).values())
        outputs = await collect(engine, "r0", [1, 2], SamplingParams(max_tokens=3))
        assert completed(outputs).outputs[0].token_ids == expected([1, 2], 3)

    asyncio.run(main())


def test_closing_ends_what_runs_and_refuses_what_comes(tokenizer: Tokenizer) -> None:
    inner = make_engine(SlowRunner(VOCAB, 4), tokenizer, num_blocks=256, max_num_seqs=2)
    engine = AsyncEngine(inner)

    async def main() -> None:
        tasks = [asyncio.create_task(collect(engine, f"r{i}", [i, 1], LONG)) for i in range(4)]  # two of them wait
        await asyncio.sleep(0.02)
        engine.close()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, MlserveError)
            assert "the engine was closed" in str(result)
        for late in (collect(engine, "late", [1], LONG), engine.call(lambda inner: None)):
            with pytest.raises(MlserveError, match="the engine is closed"):
                await asyncio.wait_for(late, timeout=5)

    asyncio.run(main())
    engine.close()  # a second time does nothing
    assert inner.cache.stats().num_referenced == 0
    assert not inner.has_work()
    assert not engine._thread.is_alive()


def test_requests_that_arrive_while_it_closes_are_answered_or_refused(tokenizer: Tokenizer) -> None:
    """None may wait for ever, whatever the order in which the two threads come to it."""
    for _ in range(20):
        engine = AsyncEngine(make_engine(SlowRunner(VOCAB, 4), tokenizer))

        async def main(engine: AsyncEngine = engine) -> None:
            closer = threading.Thread(target=engine.close)
            tasks = []
            for i in range(40):
                tasks.append(asyncio.create_task(collect(engine, f"r{i}", [i], SamplingParams(max_tokens=1))))
                tasks.append(asyncio.create_task(engine.call(lambda inner: inner.cache.stats())))
                if i == 20:
                    closer.start()
                await asyncio.sleep(0)
            results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), timeout=10)
            closer.join()
            assert all(not isinstance(r, BaseException) or isinstance(r, MlserveError) for r in results)
            assert isinstance(results[-1], MlserveError)

        asyncio.run(main())


def test_call_returns_or_raises_what_its_action_does(engine: AsyncEngine) -> None:
    def fails(inner: Engine) -> object:
        raise KeyError("gone")

    async def main() -> None:
        assert await engine.call(lambda inner: inner.cache.stats().num_blocks) == 256
        assert await engine.call(lambda inner: threading.current_thread().name) == "mlserve-engine"
        with pytest.raises(KeyError, match="gone"):
            await engine.call(fails)
        running = asyncio.create_task(collect(engine, "r", [1, 2], SamplingParams(max_tokens=30)))
        await asyncio.sleep(0.005)
        await engine.call(lambda inner: inner.reset_prefix_cache())  # between two steps of a running request
        assert completed(await running).outputs[0].token_ids == expected([1, 2], 30)

    asyncio.run(main())


def test_a_cancelled_call_disturbs_nobody(engine: AsyncEngine) -> None:
    complaints: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        held = threading.Event()
        first = asyncio.create_task(engine.call(lambda inner: held.wait(5)))
        second = asyncio.create_task(engine.call(lambda inner: 1 / 0))
        await asyncio.sleep(0.01)
        first.cancel()
        second.cancel()
        held.set()
        assert await engine.call(lambda inner: 7) == 7

    asyncio.run(main())
    assert not complaints


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_caller_whose_loop_is_closed_is_given_up(engine: AsyncEngine) -> None:
    """Its loop was closed without a word to anybody, while it waited for outputs and for a call."""
    held = threading.Event()
    loop = asyncio.new_event_loop()
    lost = [
        loop.create_task(coroutine)
        for coroutine in (collect(engine, "lost", [1, 2], LONG), engine.call(lambda inner: held.wait(5)))
    ]
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
    held.set()

    async def main() -> None:
        assert not any((await settled(engine)).values())
        assert await engine.call(lambda inner: len(inner.runner.steps)) < 300  # of the four hundred it wanted
        outputs = await collect(engine, "lost", [3, 4], SamplingParams(max_tokens=3))
        assert completed(outputs).outputs[0].token_ids == expected([3, 4], 3)

    asyncio.run(main())
    lost.clear()
    gc.collect()  # what the tasks do when they are dropped has no loop to run in; better here than in another test


def test_callers_in_several_event_loops(engine: AsyncEngine) -> None:
    found: dict[int, list[int]] = {}

    def caller(i: int) -> None:
        outputs = asyncio.run(collect(engine, f"r{i}", [i, i], SamplingParams(max_tokens=12)))
        found[i] = completed(outputs).outputs[0].token_ids

    threads = [threading.Thread(target=caller, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: expected([i, i], 12) for i in range(4)}

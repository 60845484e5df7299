"""Requests with adapters in the engine: waiting for them, slots, marks, and what is left behind."""

from __future__ import annotations

from itertools import pairwise

import pytest
from engines import generate, make_engine, run, step, submit
from fake_adapters import FakeRegistry, fake_adapter
from fakes import ContextRunner

from mlserve.cache.marks import MarkKind
from mlserve.engine.admission import activation_start
from mlserve.engine.engine import Engine
from mlserve.engine.queues import OrderedQueue
from mlserve.engine.tokenizer import Tokenizer
from mlserve.errors import AdapterNotFoundError
from mlserve.model.plan import SequenceT, StepPlan, StepResult
from mlserve.request import FinishReason, RequestOptions, RequestOutput, SamplingParams

PARAMS = SamplingParams(max_tokens=4)
PROMPT = list(range(12))


@pytest.fixture
def registry() -> FakeRegistry:
    return FakeRegistry(
        a=fake_adapter("a"),
        b=fake_adapter("b"),
        c=fake_adapter("c"),
        activated=fake_adapter("activated", (9, 10)),
    )


@pytest.fixture
def engine(tokenizer: Tokenizer, registry: FakeRegistry) -> Engine:
    return make_engine(ContextRunner(256, 4), tokenizer, adapters=registry, max_loras=2)


def alone(tokenizer: Tokenizer, name: str | None, prompt: list[int] = PROMPT) -> list[int]:
    registry = FakeRegistry(**{} if name is None else {name: fake_adapter(name)})
    engine = make_engine(ContextRunner(256, 4), tokenizer, adapters=registry, caching=False)
    return tokens(generate(engine, prompt, PARAMS, adapter=name))


def tokens(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def test_adapters_and_the_base_model_side_by_side(engine: Engine, registry: FakeRegistry, tokenizer: Tokenizer) -> None:
    for name in ("a", "b", None):
        submit(engine, str(name), PROMPT, PARAMS, adapter=name)
    outputs = run(engine)
    answers = {name: tokens(outputs[str(name)]) for name in ("a", "b", None)}
    assert answers == {name: alone(tokenizer, name) for name in ("a", "b", None)}
    assert all(x != y for x, y in pairwise(answers.values()))
    assert registry.leases == set()


def test_a_request_waits_for_its_adapter_and_holds_nobody_up(engine: Engine, registry: FakeRegistry) -> None:
    registry.loading.add("a")
    submit(engine, "waits", PROMPT, PARAMS, adapter="a")
    submit(engine, "runs", [50, 51], SamplingParams(max_tokens=2))
    for _ in range(2):
        assert {output.request_id for output in step(engine)} == {"runs"}
    assert registry.waited == 0  # there was something to do
    registry.loading.clear()
    assert [output.request_id for output in step(engine)] == ["waits"]
    assert len(tokens(run(engine)["waits"])) == 4


def test_with_nothing_else_to_do_a_step_waits_for_the_adapter(engine: Engine, registry: FakeRegistry) -> None:
    registry.loading.add("a")
    submit(engine, "only", PROMPT, PARAMS, adapter="a")
    assert engine.has_work()
    assert [output.request_id for output in step(engine)] == ["only"]
    assert registry.waited == 1


def test_an_adapter_that_can_not_be_loaded_fails_its_requests_only(engine: Engine, registry: FakeRegistry) -> None:
    registry.loading.add("a")
    registry.failing.add("a")
    submit(engine, "fails", PROMPT, SamplingParams(max_tokens=4, n=2), adapter="a")
    submit(engine, "runs", PROMPT, PARAMS)
    registry.loading.clear()
    outputs = run(engine)
    assert outputs["fails"].error == "adapter 'a' can't be loaded"
    assert [o.finish_reason for o in outputs["fails"].outputs] == [FinishReason.ERROR] * 2
    assert outputs["runs"].error is None
    assert registry.leases == set()


def test_unknown_adapters_are_refused_at_once(engine: Engine, registry: FakeRegistry) -> None:
    with pytest.raises(AdapterNotFoundError):
        submit(engine, "r", PROMPT, PARAMS, adapter="nobody")
    assert not engine.has_work()
    request = engine.prepare("r", PROMPT, PARAMS, RequestOptions(adapter="a"))
    del registry.adapters["a"]  # unloaded between the two
    with pytest.raises(AdapterNotFoundError):
        engine.submit(request)
    assert not engine.has_work()
    assert engine.abort("r") == []


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_aborting_gives_everything_back(engine: Engine, registry: FakeRegistry, steps: int) -> None:
    if steps == 0:
        registry.loading.add("a")
    submit(engine, "r", PROMPT, PARAMS, adapter="a")
    for _ in range(steps):
        step(engine)
    (output,) = engine.abort("r")
    assert output.finish_reason is FinishReason.ABORT
    assert not engine.has_work()
    assert registry.leases == set()
    assert engine.cache.stats().num_referenced == 0
    engine.scheduler.slots.check()
    assert engine.scheduler.slots.can_take(bytes(32))


def test_a_reload_does_not_touch_what_runs(engine: Engine, registry: FakeRegistry, tokenizer: Tokenizer) -> None:
    submit(engine, "old", PROMPT, PARAMS, adapter="a")
    step(engine)
    registry.adapters["a"] = fake_adapter("new content")
    submit(engine, "new", PROMPT, PARAMS, adapter="a")
    outputs = run(engine)
    assert tokens(outputs["old"]) == alone(tokenizer, "a")
    assert tokens(outputs["new"]) != tokens(outputs["old"])
    assert outputs["new"].metrics.cached_tokens == 0


def test_slots_are_reused_least_recently_used_first(engine: Engine) -> None:
    runner = engine.runner
    assert isinstance(runner, ContextRunner)
    a, b, c = (fake_adapter(name).digest for name in "abc")
    for name, expected in (("a", [a]), ("b", [a, b]), ("a", [a, b]), ("c", [a, c]), ("b", [b, c])):
        generate(engine, PROMPT, PARAMS, adapter=name)
        assert [runner.adapters[slot] for slot in sorted(runner.adapters)] == expected


def test_siblings_share_their_adapter(engine: Engine) -> None:
    output = generate(engine, PROMPT, SamplingParams(max_tokens=4, n=3), adapter="a")
    assert [o.token_ids for o in output.outputs] == [output.outputs[0].token_ids] * 3


class FailsOnce(ContextRunner):
    """Raises in the first step, after it has written what was to be loaded, and for one request alone."""

    def run(self, plan: StepPlan[SequenceT]) -> StepResult:
        if any(200 in sequence.token_ids for sequence in plan.sequences):
            raise RuntimeError("the adapter's memory can't be had")
        return super().run(plan)


def test_after_a_failed_step_an_adapter_is_written_again(tokenizer: Tokenizer, registry: FakeRegistry) -> None:
    engine = make_engine(FailsOnce(256, 4), tokenizer, adapters=registry, max_loras=2)
    output = generate(engine, [200, 201], PARAMS, adapter="a")
    assert output.error is not None
    assert not engine.scheduler.slots.is_resident(fake_adapter("a").digest)
    assert tokens(generate(engine, PROMPT, PARAMS, adapter="a")) == alone(tokenizer, "a")


def test_preempted_sequences_come_back_with_their_adapter(tokenizer: Tokenizer, registry: FakeRegistry) -> None:
    engine = make_engine(ContextRunner(256, 4), tokenizer, adapters=registry, max_loras=2, num_blocks=8)
    params = SamplingParams(max_tokens=12)
    for name in ("a", "b", "c"):
        submit(engine, name, [*PROMPT, 3], params, adapter=name)
    outputs = run(engine)
    assert sum(output.metrics.preemptions for output in outputs.values()) > 0
    for name in ("a", "b", "c"):
        assert tokens(outputs[name])[:4] == alone(tokenizer, name, [*PROMPT, 3])


def test_an_activated_adapter_shares_what_comes_before_it(engine: Engine) -> None:
    generate(engine, PROMPT, PARAMS)
    output = generate(engine, PROMPT, PARAMS, adapter="activated")
    assert output.metrics.cached_tokens == 8
    request = engine.prepare("r", PROMPT, PARAMS, RequestOptions(adapter="activated"))
    engine.submit(request)
    assert [(mark.kind, mark.start, mark.end) for mark in request.marks] == [(MarkKind.ADAPTER, 9, None)]
    run(engine)


def test_an_activated_adapter_that_is_not_invoked_is_the_base_model(engine: Engine, tokenizer: Tokenizer) -> None:
    prompt = [1, 2, 3, 9, 4, 10]
    output = generate(engine, prompt, PARAMS, adapter="activated")
    assert tokens(output) == alone(tokenizer, None, prompt)
    assert engine.scheduler.slots.can_take(bytes(32))


@pytest.mark.parametrize(
    ("prompt", "tokens", "start"),
    [
        ([1, 2, 3], None, 0),
        ([1, 2, 3], (2, 3), 1),
        ([2, 3, 1, 2, 3, 2], (2, 3), 3),
        ([1, 1, 1], (1, 1), 1),
        ([1], (1, 2), None),
        ([3, 2], (2, 3), None),
        ([5], (5,), 0),
    ],
)
def test_activation_start(prompt: list[int], tokens: tuple[int, ...] | None, start: int | None) -> None:
    assert activation_start(prompt, tokens) == start


def test_a_cold_adapter_is_not_starved_by_a_hot_one(tokenizer: Tokenizer, registry: FakeRegistry) -> None:
    engine = make_engine(
        ContextRunner(256, 4), tokenizer, adapters=registry, max_loras=2, max_num_seqs=2, num_blocks=400
    )
    for i in range(30):
        submit(engine, f"hot{i}", [i, *PROMPT], PARAMS, adapter="a")
    submit(engine, "cold", PROMPT, PARAMS, adapter="b")
    order = [output.request_id for _ in range(200) for output in step(engine) if output.completed is not None]
    assert order.index("cold") <= 3
    hot = [name for name in order if name != "cold"]
    assert hot == [f"hot{i}" for i in range(30)]  # order of arrival within an adapter


def test_tenants_share_an_adapter_fairly(tokenizer: Tokenizer, registry: FakeRegistry) -> None:
    engine = make_engine(ContextRunner(256, 4), tokenizer, adapters=registry, max_num_seqs=1, num_blocks=400)
    for i in range(10):
        submit(engine, f"many{i}", [i, *PROMPT], PARAMS, adapter="a", tenant="many")
    submit(engine, "one", PROMPT, PARAMS, adapter="a", tenant="one")
    order = [output.request_id for _ in range(100) for output in step(engine) if output.completed is not None]
    assert order.index("one") <= 1


def test_a_policy_of_ones_own(tokenizer: Tokenizer) -> None:
    class LastFirst(OrderedQueue):
        def candidates(self):  # type: ignore[no-untyped-def]
            return iter(list(super().candidates())[::-1])

    engine = make_engine(ContextRunner(256, 4), tokenizer, policy=LastFirst, max_num_seqs=1)
    for name in "abc":
        submit(engine, name, PROMPT, SamplingParams(max_tokens=1))
    order = [output.request_id for _ in range(3) for output in step(engine)]
    assert order == ["c", "b", "a"]


def test_only_one_adapter_makes_room_for_one_that_waits(tokenizer: Tokenizer, registry: FakeRegistry) -> None:
    """Two slots: a with three long answers and more to come, b with one. c gets b's slot, and a is never held up."""
    engine = make_engine(
        ContextRunner(256, 4), tokenizer, adapters=registry, max_loras=2, max_num_seqs=8, max_skips=1, num_blocks=400,
        policy="fcfs",
    )  # fmt: skip
    long, short = SamplingParams(max_tokens=40), SamplingParams(max_tokens=8)
    for i in range(3):
        submit(engine, f"a{i}", [i, *PROMPT], long, adapter="a")
    submit(engine, "b0", PROMPT, short, adapter="b")
    step(engine)
    submit(engine, "c", PROMPT, short, adapter="c")
    submit(engine, "overtakes", [9, *PROMPT], short, adapter="a")
    submit(engine, "b1", [8, *PROMPT], short, adapter="b")
    submit(engine, "a3", [7, *PROMPT], short, adapter="a")
    step(engine)
    running = {s.request.request_id for s in engine.scheduler.running}
    assert running == {"a0", "a1", "a2", "b0", "overtakes", "a3"}
    order = [output.request_id for _ in range(60) for output in step(engine) if output.completed is not None]
    assert order.index("b0") < order.index("c") < order.index("b1") < order.index("a0")

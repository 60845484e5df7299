"""What holds of every plan, whatever the traffic."""

from __future__ import annotations

import random
from itertools import pairwise

from engines import make_engine
from fake_adapters import FakeRegistry, fake_adapter
from fakes import ContextRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from mlserve.engine.engine import Engine
from mlserve.engine.sequence import Sequence
from mlserve.engine.tokenizer import Tokenizer
from mlserve.model.plan import StepPlan, StepResult
from mlserve.request import FinishReason, RequestOptions, SamplingParams

VOCAB = 256


def random_engine(tokenizer: Tokenizer, rng: random.Random) -> Engine:
    max_num_seqs = rng.choice([1, 2, 5])
    block_size = rng.choice([1, 3, 4])
    return make_engine(
        ContextRunner(VOCAB, block_size),
        tokenizer,
        block_size=block_size,
        num_blocks=rng.choice([6, 10, 40]),
        caching=rng.random() < 0.7,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.choice([max_num_seqs, 7, 30]),
        max_skips=rng.choice([0, 1, 4, 64]),
        policy=rng.choice(["fair", "fcfs", "priority"]),
        adapters=FakeRegistry(
            plain=fake_adapter("plain"), same=fake_adapter("plain"), other=fake_adapter("other"),
            activated=fake_adapter("activated", (2, 3)),
        ),
        max_loras=rng.choice([1, 2, 3]),
    )  # fmt: skip


def arrive(engine: Engine, rng: random.Random, name: str) -> list[Sequence]:
    longest = min(engine.limits.capacity - 1, 16)
    stem = rng.randrange(3)
    prompt = [(stem + i) % VOCAB for i in range(rng.randint(1, longest))]
    params = SamplingParams(
        max_tokens=rng.randint(1, 8), n=rng.choice([1, 1, 1, 3]), prompt_logprobs=rng.choice([None, None, None, 0])
    )
    priority = rng.randrange(3) if engine.scheduler.config.policy == "priority" else 0
    options = RequestOptions(
        adapter=rng.choice([None, None, "plain", "same", "other", "activated"]),
        priority=priority,
        cache_salt=rng.choice([None, None, None, "salt"]),
        tenant=rng.choice([None, None, None, "tenant"]),
    )
    request = engine.prepare(name, prompt, params, options)
    engine.submit(request)
    return request.sequences


def check_queues(engine: Engine, live: list[Sequence]) -> None:
    scheduler = engine.scheduler
    in_turn = list(scheduler.waiting.candidates())
    ordered = {"running": scheduler.running} | {
        str(flow): [s for s in in_turn if s.flow == flow] for flow in {s.flow for s in in_turn}
    }
    for name, queue in ordered.items():
        assert all(a.order < b.order for a, b in pairwise(queue)), f"{name} is out of order"
    waiting, running = set(in_turn), set(scheduler.running)
    assert len(waiting) == len(in_turn) == len(scheduler.waiting)
    assert not waiting & running
    assert waiting | running == {s for s in live if not s.is_finished}, "a sequence is lost, or kept beyond its end"
    assert len(running) <= scheduler.config.max_num_seqs
    assert all(s.blocks.table for s in running)
    assert not any(s.blocks.table or s.num_computed for s in waiting)
    assert all((s.adapter is None) == (s.adapter_slot is None) for s in running)
    assert all(s.adapter_slot is None for s in waiting)


def check_plan(engine: Engine, plan: StepPlan[Sequence], was_running: list[Sequence]) -> None:
    config, running = engine.scheduler.config, engine.scheduler.running
    assert plan.num_tokens <= config.max_num_batched_tokens
    assert len(set(plan.sequences)) == len(plan.sequences)
    for row, (sequence, query_len) in enumerate(zip(plan.sequences, plan.query_lens, strict=True)):
        end = sequence.num_computed + query_len
        assert sequence in running
        assert query_len >= 1
        assert end <= len(sequence.token_ids)
        assert end <= len(sequence.block_table) * engine.cache.block_size
        assert (row in plan.sampled) == (end == len(sequence.token_ids))
    preempted = [s for s in was_running if s not in running]
    assert all(s.order > r.order for s in preempted for r in was_running if r in running), "not the last ones"
    assert not (preempted and set(plan.sequences) - set(was_running)), "admitted in a step that preempts"
    assert not was_running or was_running[0] in running, "the first of them must keep its blocks"
    for sequence in running:
        if sequence not in plan.sequences:  # only a prefill may miss a step, and only if others have the tokens
            assert len(sequence.token_ids) - sequence.num_computed > 1
            assert preempted or plan.num_tokens == config.max_num_batched_tokens


def check_step(engine: Engine, rng: random.Random, live: list[Sequence]) -> None:
    scheduler = engine.scheduler
    was_running = list(scheduler.running)
    plan = scheduler.plan()
    check_plan(engine, plan, was_running)
    assert plan.sequences or not scheduler.has_work(), "the scheduler stands still"
    result = engine.runner.run(plan) if plan.sequences else StepResult()
    if result.token_ids and rng.random() < 0.05:
        row = rng.choice(list(result.token_ids))
        del result.token_ids[row]
        result.errors[row] = "the model raised"
    scheduler.commit(plan, result)
    engine.cache.check()
    engine.scheduler.slots.check()
    check_queues(engine, live)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_plan_keeps_the_rules_and_the_system_drains(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    engine = random_engine(tokenizer, rng)
    live: list[Sequence] = []
    for number in range(rng.randint(1, 12)):
        live += arrive(engine, rng, f"r{number}")
        for _ in range(rng.randrange(4)):
            check_step(engine, rng, live)
        if rng.random() < 0.1:
            engine.scheduler.finish(rng.choice(live), FinishReason.ABORT)
        if rng.random() < 0.05:
            engine.reset_prefix_cache()
    # In each step the first running sequence computes a token or more. Preemption repeats at most what was computed.
    work = sum(s.max_total_tokens for s in live if not s.is_finished)
    for _ in range(2 * work + 1):
        if not engine.scheduler.has_work():
            break
        check_step(engine, rng, live)
    assert not engine.scheduler.has_work(), "the system did not drain"
    assert engine.cache.stats().num_referenced == 0

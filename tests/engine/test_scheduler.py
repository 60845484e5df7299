"""Plans of the scheduler, step by step: who runs, with how many tokens, and who waits."""

from __future__ import annotations

from itertools import pairwise

import pytest
from engines import make_engine
from fakes import CountingRunner

from mlserve.engine.engine import Engine
from mlserve.engine.scheduler import _LOOKAHEAD
from mlserve.engine.sequence import Sequence
from mlserve.engine.tokenizer import Tokenizer
from mlserve.model.plan import StepPlan
from mlserve.request import FinishReason, RequestOptions, SamplingParams

VOCAB = 256


def counting_engine(tokenizer: Tokenizer, **options: object) -> Engine:
    return make_engine(CountingRunner(VOCAB), tokenizer, **options)


def queue(
    engine: Engine, name: str, prompt: int | list[int], max_tokens: int = 4, n: int = 1, **how: object
) -> list[Sequence]:
    """Submit a request; a prompt given by its length shares no block with any other name."""
    ids = prompt if isinstance(prompt, list) else [hash_of(name, i) for i in range(prompt)]
    request = engine.prepare(name, ids, SamplingParams(max_tokens=max_tokens, n=n), RequestOptions(**how))
    engine.submit(request)
    return request.sequences


def waiting(engine: Engine) -> list[Sequence]:
    """In the order in which they would be admitted."""
    return list(engine.scheduler.waiting.candidates())


def hash_of(name: str, position: int) -> int:
    return (sum(name.encode()) * 31 + position * 7) % VOCAB


def planned(plan: StepPlan[Sequence]) -> dict[str, int]:
    """Tokens by name; `r.1` is the second of a request's sequences."""
    names = [s.request.request_id + (f".{s.index}" if s.params.n > 1 else "") for s in plan.sequences]
    assert len(names) == len(set(names))
    return dict(zip(names, plan.query_lens, strict=True))


def step(engine: Engine) -> dict[str, int]:
    """Plan a step and commit it."""
    plan = engine.scheduler.plan()
    engine.scheduler.commit(plan, engine.runner.run(plan))
    engine.cache.check()
    return planned(plan)


def names(sequences: list[Sequence]) -> list[str]:
    return [s.request.request_id for s in sequences]


def test_decodes_come_first_and_prefills_share_the_rest(tokenizer: Tokenizer) -> None:
    engine = counting_engine(tokenizer, max_num_batched_tokens=8, max_num_seqs=8)
    queue(engine, "a", 5)
    queue(engine, "b", 5)
    queue(engine, "c", 12)
    assert step(engine) == {"a": 5, "b": 3}
    assert step(engine) == {"a": 1, "b": 2, "c": 5}
    assert step(engine) == {"a": 1, "b": 1, "c": 6}
    assert step(engine) == {"a": 1, "b": 1, "c": 1}


def test_a_running_prefill_goes_before_one_that_waits(tokenizer: Tokenizer) -> None:
    engine = counting_engine(tokenizer, max_num_batched_tokens=8, max_num_seqs=8)
    queue(engine, "long", 20)
    assert step(engine) == {"long": 8}
    queue(engine, "short", 2)
    assert step(engine) == {"long": 8}
    assert step(engine) == {"long": 4, "short": 2}


def test_rows_that_compute_their_last_token_are_sampled(tokenizer: Tokenizer) -> None:
    engine = counting_engine(tokenizer, max_num_batched_tokens=8, max_num_seqs=8)
    queue(engine, "a", 3)
    queue(engine, "b", 9)
    plan = engine.scheduler.plan()
    assert planned(plan) == {"a": 3, "b": 5}
    assert plan.sampled == [0]
    assert plan.num_tokens == 8


def test_max_num_seqs_bounds_what_runs(tokenizer: Tokenizer) -> None:
    engine = counting_engine(tokenizer, max_num_seqs=2)
    for name in "abc":
        queue(engine, name, 3, max_tokens=2)
    assert step(engine) == {"a": 3, "b": 3}
    assert step(engine) == {"a": 1, "b": 1}
    assert step(engine) == {"c": 3}


def test_planning_names_no_block(tokenizer: Tokenizer) -> None:
    engine = counting_engine(tokenizer)
    queue(engine, "a", 9)
    plan = engine.scheduler.plan()
    assert engine.cache.stats().num_cached == 0
    assert engine.cache.stats().num_referenced == 3
    engine.scheduler.commit(plan, engine.runner.run(plan))
    assert engine.cache.stats().num_cached == 2


@pytest.mark.parametrize("max_skips", [0, 1, 5])
def test_one_that_lacks_blocks_is_overtaken_max_skips_times(tokenizer: Tokenizer, max_skips: int) -> None:
    """Pool of 10 blocks: the runner holds 6, the large one needs 8, the small ones 1 each."""
    engine = counting_engine(tokenizer, num_blocks=10, max_skips=max_skips)
    queue(engine, "runs", 21, max_tokens=4)
    step(engine)
    (large,) = queue(engine, "large", 30, max_tokens=1)
    for i in range(20):
        queue(engine, f"small{i}", 2, max_tokens=1)
    before = []
    while "large" not in (now := step(engine)):
        before += [name for name in now if name.startswith("small")]
        assert large.overtaken == len(before)
    assert before == [f"small{i}" for i in range(max_skips)]
    assert "runs" not in names(engine.scheduler.running)  # it began as soon as it could
    assert large.overtaken == 0


def test_overtaking_looks_only_so_far(tokenizer: Tokenizer) -> None:
    for num_large, overtakes in ((_LOOKAHEAD, True), (_LOOKAHEAD + 1, False)):
        engine = counting_engine(tokenizer, num_blocks=10)
        queue(engine, "runs", 21)
        step(engine)
        for i in range(num_large):
            queue(engine, f"large{i}", 30)
        queue(engine, "small", 2)
        assert ("small" in step(engine)) is overtakes


def test_siblings_wait_for_the_prompt(tokenizer: Tokenizer) -> None:
    engine = counting_engine(tokenizer, max_num_batched_tokens=6, max_num_seqs=6)
    queue(engine, "r", 10, n=3)
    assert step(engine) == {"r.0": 6}
    assert step(engine) == {"r.0": 4}
    assert step(engine) == {"r.0": 1, "r.1": 2, "r.2": 2}  # 8 of 10 tokens are in full blocks


@pytest.mark.parametrize("caching", [True, False])
def test_siblings_outlive_their_first(tokenizer: Tokenizer, caching: bool) -> None:
    engine = counting_engine(tokenizer, caching=caching)
    first, *_ = queue(engine, "r", 10, n=3, max_tokens=9)
    step(engine)
    engine.scheduler.finish(first, FinishReason.STOP)
    uncached = 2 if caching else 10  # nobody is left to take the prompt's blocks from, but the cache may have them
    assert step(engine) == {"r.1": uncached, "r.2": uncached}
    assert step(engine) == {"r.1": 1, "r.2": 1}


def test_blocks_run_out_and_the_last_gives_its_own_back(tokenizer: Tokenizer) -> None:
    engine = counting_engine(tokenizer, num_blocks=6)
    for name in "abc":
        queue(engine, name, 7, max_tokens=12)  # two blocks each, full after one more token
    queue(engine, "late", 7)
    assert step(engine) == {"a": 7, "b": 7, "c": 7}
    assert step(engine) == {"a": 1, "b": 1, "c": 1}
    assert step(engine) == {"a": 1, "b": 1}  # c's two blocks went to a and b, and it waits before the later one
    assert names(waiting(engine)) == ["c", "late"]
    assert [s.request.metrics.preemptions for s in (*engine.scheduler.running, *waiting(engine))] == [
        0, 0, 1, 0,
    ]  # fmt: skip


def test_nobody_is_admitted_in_a_step_that_preempts(tokenizer: Tokenizer) -> None:
    engine = counting_engine(tokenizer, num_blocks=6)
    for name in "ab":
        queue(engine, name, 8, max_tokens=16)
    step(engine)
    step(engine)  # both have their third block
    queue(engine, "tiny", 2)
    for _ in range(3):
        assert step(engine) == {"a": 1, "b": 1}
    assert step(engine) == {"a": 1}  # b's three blocks are free, and a took one of them
    assert names(waiting(engine)) == ["b", "tiny"]
    assert step(engine) == {"a": 1, "tiny": 2}  # b needs four and there are two


def test_the_last_in_order_gives_up_its_own_turn(tokenizer: Tokenizer) -> None:
    engine = counting_engine(tokenizer, num_blocks=5)
    queue(engine, "a", 10, max_tokens=8)  # three blocks; two places left
    queue(engine, "b", 8, max_tokens=8)  # two blocks, full
    assert step(engine) == {"a": 10, "b": 8}
    assert step(engine) == {"a": 1}  # b needs a block and is itself the last one
    assert names(waiting(engine)) == ["b"]
    assert waiting(engine)[0].num_computed == 0


def test_what_was_preempted_comes_back_from_the_cache(tokenizer: Tokenizer) -> None:
    engine = counting_engine(tokenizer, num_blocks=5)
    queue(engine, "a", 10, max_tokens=2)
    queue(engine, "b", 8, max_tokens=8)
    step(engine)
    assert step(engine) == {"a": 1}
    assert step(engine) == {"b": 1}  # eight prompt tokens from the cache, and the one that it had generated
    (b,) = engine.scheduler.running
    assert len(b.token_ids) == 10
    assert b.request.metrics.cached_tokens == 0  # of its first admission


def test_priority_orders_admission_and_preemption(tokenizer: Tokenizer) -> None:
    engine = counting_engine(tokenizer, num_blocks=5, policy="priority")
    queue(engine, "low", 7, max_tokens=12, priority=9)
    queue(engine, "high", 7, max_tokens=12, priority=1)
    queue(engine, "low too", 7, max_tokens=12, priority=9)
    assert names(waiting(engine)) == ["high", "low", "low too"]
    assert step(engine) == {"high": 7, "low": 7}
    assert names(engine.scheduler.running) == ["high", "low"]
    step(engine)
    assert step(engine) == {"high": 1}  # both want a third block; one is left, and the lower one had no claim to it
    assert names(waiting(engine)) == ["low", "low too"]


def test_a_late_request_of_higher_priority_takes_no_blocks_from_those_that_run(tokenizer: Tokenizer) -> None:
    engine = counting_engine(tokenizer, num_blocks=4, policy="priority")
    queue(engine, "low", 10, max_tokens=4, priority=9)
    step(engine)
    queue(engine, "high", 10, priority=1)
    for _ in range(3):
        assert step(engine) == {"low": 1}
    assert step(engine) == {"high": 10}


def test_what_a_prefill_is_writing_is_waited_for(tokenizer: Tokenizer) -> None:
    """Blocks of 4, chunks of 8: the second prompt shares 16 tokens with the first and starts where they part."""
    engine = counting_engine(tokenizer, max_num_batched_tokens=8, max_num_seqs=8)
    shared = list(range(16))
    queue(engine, "first", [*shared, *range(50, 60)])
    (second,) = queue(engine, "second", [*shared, *range(90, 94)])
    assert step(engine) == {"first": 8}
    assert step(engine) == {"first": 8}
    assert step(engine) == {"first": 8}
    assert step(engine) == {"first": 2, "second": 4}
    assert second.request.metrics.cached_tokens == 16


def test_one_that_waits_for_a_prefill_is_passed_by_others(tokenizer: Tokenizer) -> None:
    engine = counting_engine(tokenizer, max_skips=0)
    for name in ("first", "same"):
        queue(engine, name, list(range(8)))
    queue(engine, "other", 8)
    assert step(engine) == {"first": 8, "other": 8}
    assert step(engine) == {"first": 1, "same": 4, "other": 1}


@pytest.mark.parametrize(("caching", "salts"), [(False, (None, None)), (True, ("a", "b"))])
def test_what_can_not_be_hit_is_not_waited_for(
    tokenizer: Tokenizer, caching: bool, salts: tuple[str | None, str | None]
) -> None:
    engine = counting_engine(tokenizer, caching=caching)
    for name, salt in zip(("first", "second"), salts, strict=True):
        queue(engine, name, list(range(8)), cache_salt=salt)
    assert step(engine) == {"first": 8, "second": 8}


def test_a_writer_that_is_aborted_holds_nobody_up(tokenizer: Tokenizer) -> None:
    engine = counting_engine(tokenizer, max_num_batched_tokens=8, max_num_seqs=8)
    queue(engine, "first", list(range(30)))
    queue(engine, "second", list(range(30)))
    assert step(engine) == {"first": 8}
    engine.abort("first")
    assert step(engine) == {"second": 8}
    (second,) = engine.scheduler.running
    assert second.request.metrics.cached_tokens == 8  # what was written stays


def test_finishing_twice_does_nothing(tokenizer: Tokenizer) -> None:
    engine = counting_engine(tokenizer)
    (runs,) = queue(engine, "a", 5)
    (waits,) = queue(engine, "b", 5)
    step(engine)
    for sequence in (runs, waits):
        engine.scheduler.finish(sequence, FinishReason.ABORT)
        engine.scheduler.finish(sequence, FinishReason.STOP, "late")
        assert (sequence.finish_reason, sequence.stop_reason) == (FinishReason.ABORT, None)
    assert not engine.scheduler.has_work()
    assert engine.cache.stats().num_referenced == 0


def test_a_steady_flow_of_small_ones_does_not_starve_a_large_one(tokenizer: Tokenizer) -> None:
    engine = counting_engine(tokenizer, num_blocks=10, max_skips=8, max_num_seqs=8)
    for i in range(4):
        queue(engine, f"small{i}", 3, max_tokens=5)
    (large,) = queue(engine, "large", 36, max_tokens=1)
    started = None
    for at in range(200):
        queue(engine, f"more{at}", 3, max_tokens=5)
        if "large" in step(engine):
            started = at
            break
    # It is overtaken eight times at most; whoever runs then ends within five steps, and so does whoever was preempted.
    assert started is not None
    assert started <= 8 + 2 * 5
    assert large.order < min(s.order for s in waiting(engine))


def test_orders_are_unique_and_ascending(tokenizer: Tokenizer) -> None:
    engine = counting_engine(tokenizer)
    sequences = [s for name in "abc" for s in queue(engine, name, 3, n=2)]
    assert all(a.order < b.order for a, b in pairwise(sequences))
    assert waiting(engine) == sequences


def test_one_that_needs_a_larger_step_has_overtaken_nobody(tokenizer: Tokenizer) -> None:
    """An image that is computed whole finds too little of the step left: nobody is admitted, and nobody was passed."""
    engine = counting_engine(tokenizer, num_blocks=10, max_num_batched_tokens=9, max_num_seqs=4, policy="fcfs")
    queue(engine, "runs", 5, max_tokens=20)
    step(engine)
    (large,) = queue(engine, "large", 38, max_tokens=1)
    (image,) = queue(engine, "image", 9)
    image.whole_ranges = ((0, 9),)
    assert step(engine) == {"runs": 1}
    assert [s.overtaken for s in (large, image)] == [0, 0]

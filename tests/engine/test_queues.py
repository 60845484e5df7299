"""The queues that sequences wait in: who is admitted next."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiters import Waiter, admit, crowd, filled, names, shares

from mlserve.config import Policy
from mlserve.engine.queues import FairQueue, OrderedQueue, waiting_queue

SEEDS = st.integers(0, 2**32)


@pytest.mark.parametrize("kind", [OrderedQueue, FairQueue])
def test_order_of_one_flow(kind: Any) -> None:
    early, middle, late = Waiter("a", 1), Waiter("a", 2), Waiter("a", 3)
    queue = filled(kind(), middle, late, early)
    assert names(queue.candidates()) == ["a1", "a2", "a3"]
    assert len(queue) == 3
    assert queue.remove(middle)
    assert not queue.remove(middle)
    assert not queue.remove(Waiter("a", 1))  # equal, but another one
    assert not queue.remove(Waiter("b", 1))
    assert names(queue.candidates()) == ["a1", "a3"]
    assert len(queue) == 2


def test_priority_goes_before_arrival() -> None:
    queue = filled(OrderedQueue(), Waiter("a", 1, priority=1), Waiter("b", 2, priority=0), Waiter("a", 3, priority=-1))
    assert names(queue.candidates()) == ["a3", "b2", "a1"]


def test_each_policy_has_its_queue() -> None:
    queues = {Policy.FAIR: FairQueue, Policy.FCFS: OrderedQueue, Policy.PRIORITY: OrderedQueue}
    assert {policy: type(waiting_queue(policy)) for policy in Policy} == queues


@given(seed=SEEDS)
def test_single_flow_is_fcfs(seed: int) -> None:
    """Whatever is pushed, removed, passed over and charged: one flow alone sees `OrderedQueue`'s order."""
    rng = random.Random(seed)
    ordered: Any = OrderedQueue()
    fair: Any = FairQueue()
    waiters = [Waiter("a", arrival, prompt=rng.randint(1, 50)) for arrival in range(20)]
    outside = list(waiters)
    for _ in range(30):
        if outside and rng.random() < 0.6:
            waiter = outside.pop(rng.randrange(len(outside)))  # in any order: preempted ones return
            ordered.push(waiter)
            fair.push(waiter)
        elif rng.random() < 0.3:
            waiter = rng.choice(waiters)
            assert ordered.remove(waiter) == fair.remove(waiter) == (waiter not in outside)
            outside += [waiter] * (waiter not in outside)
        else:
            chances = [rng.random() for _ in waiters]
            passes = [drain_some(queue, chances) for queue in (ordered, fair)]
            assert passes[0] == passes[1]
            outside += [waiter for waiter, taken in passes[0] if taken]
        assert len(ordered) == len(fair)
    assert names(ordered.candidates()) == names(fair.candidates())


def drain_some(queue: Any, chances: list[float]) -> list[tuple[Waiter, bool]]:
    """A pass that takes some, passes others over, and ends early."""
    seen = []
    for chance, waiter in zip(chances, queue.candidates(), strict=False):
        taken = chance < 0.4
        if taken:
            queue.remove(waiter)
            queue.charge({waiter: waiter.prompt})
        seen.append((waiter, taken))
        if chance > 0.95:
            break
    return seen


@settings(deadline=None)
@given(seed=SEEDS, fair=st.booleans())
def test_none_is_lost_doubled_or_out_of_order(seed: int, fair: bool) -> None:
    rng = random.Random(seed)
    queue: Any = FairQueue(max_idle_flows=2) if fair else OrderedQueue()
    waiters = [Waiter(rng.choice("abcde"), arrival, prompt=rng.randint(1, 9)) for arrival in range(25)]
    waiting: set[Waiter] = set()
    for _ in range(20):
        queue.charge({waiter: rng.randint(1, 4) for waiter in waiters if waiter not in waiting})  # they run
        for waiter in rng.sample(waiters, 8):
            if waiter not in waiting:
                queue.push(waiter)
                waiting.add(waiter)
            elif rng.random() < 0.2:  # aborted
                assert queue.remove(waiter)
                waiting.remove(waiter)
        waiting -= check_pass(queue, waiting, rng)
        assert len(queue) == len(waiting)
        for waiter in waiters:
            if waiter not in waiting:
                assert not queue.remove(waiter)
    assert set(queue.candidates()) == waiting


def check_pass(queue: Any, waiting: set[Waiter], rng: random.Random) -> set[Waiter]:
    """A whole pass that takes, passes over and skips at random. Returns what it took."""
    unseen, taken, skipped = set(waiting), set(), set()
    latest: dict[Any, Any] = {}
    for waiter in queue.candidates():
        assert waiter in unseen, "doubled, or not waiting"
        unseen.remove(waiter)
        assert waiter.flow not in skipped
        assert waiter.flow not in latest or latest[waiter.flow] < waiter.order, "out of order within its flow"
        latest[waiter.flow] = waiter.order
        choice = rng.random()
        if choice < 0.4:
            assert queue.remove(waiter)
            queue.charge({waiter: waiter.prompt})
            taken.add(waiter)
        elif choice < 0.5:
            queue.skip_flow(waiter)
            skipped.add(waiter.flow)
    assert {waiter.flow for waiter in unseen} <= skipped, "lost"
    return taken


def test_least_served_flow_goes_first() -> None:
    queue = filled(FairQueue(), *crowd("a", range(4), prompt=30), *crowd("b", range(4, 12), prompt=10))
    # Service after each:          a 30   b 10   b 20   b 30   a 60 (a0 came before b7), b 40 ...
    assert admit(queue, 8) == ["a0", "b4", "b5", "b6", "a1", "b7", "b8", "b9"]


def test_decodes_of_running_sequences_count() -> None:
    running = Waiter("a", 0)
    queue = filled(FairQueue(), Waiter("a", 1), Waiter("b", 2))
    queue.charge({running: 1})
    assert names(queue.candidates()) == ["b2", "a1"]


@pytest.mark.parametrize(("query_len", "cost"), [(1, 2), (2, 2), (3, 3), (7, 7)])
def test_cost_of_tokens(query_len: int, cost: int) -> None:
    """After this charge to `a`, exactly as many prompts of 2 tokens of `b`'s go first as it is worth."""
    queue = filled(FairQueue(), *crowd("a", range(2)), *crowd("b", range(2, 12), prompt=2))
    queue.charge({Waiter("a", 20): query_len})
    assert admit(queue, 10).index("a0") == -(-cost // 2)


@pytest.mark.parametrize("removed", [True, False], ids=["admitted", "passed over"])
def test_cold_flow_behind_a_thousand_hot_requests(removed: bool) -> None:
    queue: Any = FairQueue()
    filled(queue, *crowd("hot", range(1000), prompt=20))
    admit(queue, 100)
    filled(queue, Waiter("cold", 1000, prompt=500))
    if removed:
        assert "cold1000" in admit(queue, 2)
    else:
        assert "cold1000" in names(islice(queue.candidates(), 2))


def test_idling_saves_nothing_up() -> None:
    queue = filled(FairQueue(), *crowd("busy", range(50), prompt=10))
    admit(queue, 40)
    filled(queue, *crowd("idle", range(100, 150), prompt=10))
    assert shares(admit(queue, 10)) == {"busy": 5, "idle": 5}


def test_idling_saves_nothing_up_while_nobody_waits() -> None:
    """As above, but each request of the busy flow is admitted at once, so that nothing waits when the other comes."""
    queue: Any = FairQueue()
    for i in range(40):
        admit(filled(queue, Waiter("busy", i, prompt=10)), 1)
    assert len(queue) == 0
    filled(
        queue,
        *crowd("idle", range(100, 150), prompt=10),
        *crowd("busy", range(200, 250), prompt=10),
    )
    assert shares(admit(queue, 10)) == {"busy": 5, "idle": 5}


def test_newcomer_starts_with_the_least_served() -> None:
    queue = filled(FairQueue(), *crowd("a", range(10), prompt=10), *crowd("b", range(10, 20), prompt=10))
    queue.charge({Waiter("a", 20): 100, Waiter("b", 21): 20})
    filled(queue, *crowd("c", range(30, 40), prompt=10))
    assert shares(admit(queue, 6)) == {"b": 3, "c": 3}


def test_running_one_long_answer_saves_nothing_up() -> None:
    quiet = Waiter("quiet", 0)
    queue = filled(FairQueue(), quiet)
    admit(queue, 1)
    filled(queue, *crowd("busy", range(1, 100), prompt=10))
    for _ in range(40):
        queue.charge({quiet: 1})
        admit(queue, 1)
    filled(queue, *crowd("quiet", range(200, 250), prompt=10))
    assert shares(admit(queue, 10)) == {"busy": 5, "quiet": 5}


def test_debt_outlives_a_pause() -> None:
    """A flow that got more than its share is not forgiven by having nothing waiting for a moment."""
    queue = filled(FairQueue(), Waiter("a", 0, prompt=100), *crowd("b", range(1, 20), prompt=10))
    assert admit(queue, 2) == ["a0", "b1"]
    filled(queue, Waiter("a", 50, prompt=100))
    # b11 waited longer than a50, and goes first when both flows are at 100.
    assert admit(queue, 11) == [f"b{i}" for i in range(2, 12)] + ["a50"]


def test_passed_over_flow_keeps_its_turn() -> None:
    """The flow that was served least is not behind only because its first sequence couldn't be admitted."""
    queue = filled(FairQueue(), Waiter("a", 0), Waiter("a", 1), *crowd("b", range(2, 5)))
    queue.charge({Waiter("b", 9): 50})
    assert names(queue.candidates()) == ["a0", "a1", "b2", "b3", "b4"]


def test_preempted_sequence_returns_to_the_front_of_its_flow() -> None:
    queue = filled(FairQueue(), Waiter("a", 3), Waiter("b", 2), Waiter("a", 5))
    assert names(queue.candidates()) == ["b2", "a3", "a5"]
    filled(queue, Waiter("a", 1))
    assert names(queue.candidates()) == ["a1", "b2", "a3", "a5"]


def test_counters_of_idle_flows_are_bounded() -> None:
    queue: Any = FairQueue(max_idle_flows=3)
    for i in range(10):
        admit(filled(queue, Waiter(f"flow{i}x", i)), 1)
    queue.charge({Waiter("flow7x", 7): 1})  # active again: kept longer than the two others
    admit(filled(queue, Waiter("other", 10)), 1)
    admit(filled(queue, Waiter("another", 11)), 1)
    assert [flow[0] for flow in queue._idle] == [b"flow7x", b"other", b"another"]
    assert not queue._accounts
    assert not queue._ranking


class CountedWaiter(Waiter):
    """Counts how often anybody looks at one."""

    looks = 0

    @property
    def order(self) -> tuple[int, int, int]:
        CountedWaiter.looks += 1
        return self._order

    @order.setter
    def order(self, order: tuple[int, int, int]) -> None:
        self._order = order


@pytest.mark.parametrize("num_flows", [1, 100, 10_000])
def test_a_short_pass_looks_at_few(num_flows: int) -> None:
    queue: Any = FairQueue()
    waiters = [CountedWaiter(f"flow{i % num_flows}x", i) for i in range(10_000)]
    filled(queue, *waiters)
    CountedWaiter.looks = 0
    assert len(admit(queue, 2)) == 2
    assert CountedWaiter.looks < 200


@pytest.mark.parametrize("num_flows", [2, 100])
def test_a_skipped_flow_is_not_looked_at(num_flows: int) -> None:
    queue: Any = FairQueue()
    filled(queue, *(CountedWaiter(f"flow{i % num_flows}x", i) for i in range(10_000)))
    CountedWaiter.looks = 0
    seen = []
    for waiter in queue.candidates():
        seen.append(waiter)
        queue.skip_flow(waiter)
    assert len(seen) == num_flows
    assert CountedWaiter.looks < 20 * num_flows

"""How fair the fair queue is: the bound of the paper on virtual token counters."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from waiters import Waiter

from mlserve.engine.queues import DECODE_COST, PREFILL_COST, FairQueue


class Server:
    """An ideal server: so many places; whoever has one decodes a token each step; admission fills free places."""

    def __init__(self, queue: Any, num_places: int) -> None:
        self.queue = queue
        self.num_places = num_places
        self.running: list[Waiter] = []
        self.service: dict[str, int] = defaultdict(int)

    def step(self) -> None:
        self.queue.charge(dict.fromkeys(self.running, 1))
        for waiter in self.running:
            self.service[waiter.flow[0].decode()] += DECODE_COST
            waiter.output -= 1
        self.running = [waiter for waiter in self.running if waiter.output > 0]
        candidates: Iterator[Waiter] = self.queue.candidates()
        while len(self.running) < self.num_places and (waiter := next(candidates, None)):
            self.queue.remove(waiter)
            self.queue.charge({waiter: waiter.prompt})
            self.service[waiter.flow[0].decode()] += PREFILL_COST * waiter.prompt
            self.running.append(waiter)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**32))
def test_service_of_backlogged_flows_differs_by_a_bounded_amount(seed: int) -> None:
    """Over any interval in which two flows always have sequences waiting, their service differs by at most 2U.

    U bounds how far one backlogged flow's counter gets above another's. A flow is admitted only while its counter is
    the lowest. Until it is lowest again it is charged at most that admission's prompt and what its sequences in the
    server's places still decode, so U = PREFILL_COST * longest prompt + DECODE_COST * places * longest output. That is
    at most twice the paper's U, max(w_p L, w_q M), whose M counts all tokens of running sequences. The difference of
    two counters stays between -U and U, so that it changes by at most 2U.
    """
    rng = random.Random(seed)
    num_places, longest, most_output = rng.randint(1, 6), rng.randint(2, 40), rng.randint(1, 12)
    bound = PREFILL_COST * longest + DECODE_COST * num_places * most_output
    flows = "abc"[: rng.randint(2, 3)]
    limits = {flow: (rng.randint(2, longest), rng.randint(1, most_output)) for flow in flows}
    server = Server(FairQueue(), num_places)
    num_arrived = 0
    differences: dict[tuple[str, str], list[int]] = defaultdict(list)  # of service, since both wait
    for _ in range(100):
        for flow in flows:
            for _ in range(rng.choice([0, 0, 0, 1, 2, 6])):
                prompt, output = limits[flow]
                server.queue.push(Waiter(flow, num_arrived, rng.randint(2, prompt), rng.randint(1, output)))
                num_arrived += 1
        before, start = backlogged(server.queue), dict(server.service)
        server.step()
        throughout = before & backlogged(server.queue)
        for a, b in combinations(flows, 2):
            seen = differences[a, b]
            if {a, b} <= throughout:
                seen.append(start.get(a, 0) - start.get(b, 0))
                seen.append(server.service[a] - server.service[b])
                assert max(seen) - min(seen) <= 2 * bound
            else:
                seen.clear()


def backlogged(queue: Any) -> set[str]:
    return {waiter.flow[0].decode() for waiter in queue.candidates()}

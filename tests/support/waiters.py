"""Stand-ins for sequences that wait in a queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any


class Waiter:
    """All that a queue knows of a sequence; what it will cost is the tests' business."""

    def __init__(self, flow: str, arrival: int, prompt: int = 1, output: int = 0, priority: int = 0) -> None:
        self.flow = (flow.encode(), None)
        self.order = (priority, arrival, 0)
        self.prompt = prompt
        self.output = output  # tokens still to be decoded

    def __repr__(self) -> str:
        return f"{self.flow[0].decode()}{self.order[1]}"


def crowd(flow: str, arrivals: range, prompt: int = 1) -> Iterator[Waiter]:
    return (Waiter(flow, arrival, prompt) for arrival in arrivals)


def names(waiters: Any) -> list[str]:
    return [repr(waiter) for waiter in waiters]


def shares(admitted: list[str]) -> Counter[str]:
    return Counter(name.rstrip("0123456789") for name in admitted)


def filled(queue: Any, *waiters: Waiter) -> Any:
    for waiter in waiters:
        queue.push(waiter)
    return queue


def admit(queue: Any, limit: int) -> list[str]:
    """Admit the first `limit` of a pass, as the scheduler does."""
    admitted = []
    for waiter in islice(queue.candidates(), limit):
        assert queue.remove(waiter)
        queue.charge({waiter: waiter.prompt})
        admitted.append(waiter)
    return names(admitted)

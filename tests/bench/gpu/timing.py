"""How long work on a device takes, and how much time is left."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Protocol

import torch

__all__ = ["CudaTimer", "Deadline", "Timer", "median_seconds"]

WARM_RUNS = 3  # the first compiles
FLUSHED_BYTES = 2**30  # many times the L2 cache; and writing it takes 0.3 ms, in which the host can launch what follows
BUDGET = 0.15  # seconds for the measured runs of one case
MIN_RUNS, MAX_RUNS = 5, 30


class Deadline:
    """A point in time. `clock`: seconds, as `time.monotonic`."""

    def __init__(self, seconds_from_now: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds_from_now

    @property
    def is_over(self) -> bool:
        return self._clock() >= self._end


class Timer(Protocol):
    """Measures work on a device."""

    def seconds(self, run: Callable[[], object], reset: Callable[[], object]) -> float:
        """A run's median time; `reset` comes before each run and isn't measured."""
        ...


class CudaTimer:
    """By CUDA events, with code that is warm and an L2 cache that holds nothing of the inputs."""

    def __init__(self, device: torch.device) -> None:
        self._flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device)

    def seconds(self, run: Callable[[], object], reset: Callable[[], object]) -> float:
        for _ in range(WARM_RUNS - 1):
            reset()
            run()
        about = self._measured(run, reset, 1)[0]
        return statistics.median(self._measured(run, reset, min(MAX_RUNS, max(MIN_RUNS, int(BUDGET / about)))))

    def _measured(self, run: Callable[[], object], reset: Callable[[], object], count: int) -> list[float]:
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for start, end in pairs:
            reset()
            self._flushed.zero_()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e-3 for start, end in pairs]


def median_seconds(work: Callable[[], object], count: int) -> float:
    """The median wall time of work that waits for the device itself; it runs once before it is measured."""
    work()
    taken = []
    for _ in range(count):
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)

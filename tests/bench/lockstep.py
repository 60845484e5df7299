"""Workloads side by side, step by step: what a noisy machine does to one it does to the others.

Whole runs one after the other differ by several per cent, because other programs come and go, and two models of the
same weights differ by one or two, by where their memory lies. So the engines here drive one runner, each with a part of
its KV pool, and take their steps in turn.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from mlserve import LLM, SamplingParams
from mlserve.cache.block_pool import BlockPool
from mlserve.cache.manager import CacheManager
from mlserve.engine.engine import Engine
from mlserve.request import RequestOptions

__all__ = ["Batch", "engines_over", "lockstep"]


@dataclass(frozen=True)
class Batch:
    """Prompts of token ids, what they ask for, and for each the adapter's name."""

    prompts: Sequence[list[int]]
    params: SamplingParams
    adapters: Sequence[str | None]


def engines_over(llm: LLM, caching: Mapping[str, bool]) -> dict[str, Engine]:
    """Engines over the weights, the adapters and the slots of `llm`, each with an equal part of its KV pool.

    `caching`: the engines' names, and whether prefix caching is on, which must be on in `llm`. While they work, `llm`
    itself must be idle. On a CPU only: a CUDA graph that was captured has the addresses of the whole pool in it.
    """
    engine, config = llm.engine, llm.config
    assert engine.runner.device.type == "cpu"
    blocks = llm.cache_stats().num_blocks // len(caching)
    engines = {}
    for part, (name, is_on) in enumerate(caching.items()):
        runner = copy.copy(engine.runner)
        runner.kv = engine.runner.kv[part * blocks :][:blocks]
        cache = CacheManager(BlockPool(blocks), engine.cache.hasher if is_on else None, config.cache.block_size)
        slots = engine.scheduler.slots
        engines[name] = Engine(runner, engine.tokenizer, cache, config.scheduler, engine.limits, engine.adapters, slots)
    return engines


def lockstep(
    engines: Mapping[str, Engine], work: Mapping[str, Sequence[Batch]], first: int = 0
) -> dict[str, list[list[float]]]:
    """Seconds of each step of each batch. The first step's begin with making the requests.

    An engine does its batches one after the other. In its turn it takes as many steps as it has batches, so that all
    engines end together if all batches take as many steps. `first`: who goes first; it moves on with each round.
    """
    turns = {name: _steps(engines[name], batches) for name, batches in work.items()}
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in batches] for name, batches in work.items()}
    names = deque(work)
    names.rotate(-first)
    while turns:
        for name in [name for name in names if name in turns]:
            taken = list(islice(turns[name], len(work[name])))
            for number, duration in taken:
                seconds[name][number].append(duration)
            if len(taken) < len(work[name]):
                del turns[name]
        names.rotate(-1)
    return seconds


def _steps(engine: Engine, batches: Sequence[Batch]) -> Iterator[tuple[int, float]]:
    """Does the batches: each step's batch and its seconds."""
    for number, batch in enumerate(batches):
        start = time.perf_counter()
        for i, (prompt, adapter) in enumerate(zip(batch.prompts, batch.adapters, strict=True)):
            engine.submit(engine.prepare(f"lockstep-{i}", prompt, batch.params, RequestOptions(adapter)))
        while engine.has_work():
            engine.step()
            yield number, time.perf_counter() - start
            start = time.perf_counter()

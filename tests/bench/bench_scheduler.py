"""Cost of one decode step of scheduler and pool, without any model: milliseconds by running sequences and by blocks.

python -m tests.bench.bench_scheduler
"""

from __future__ import annotations

import statistics
import time

from mlserve.adapters.slot_table import SlotTable
from mlserve.cache.block_pool import BlockPool
from mlserve.cache.hashing import BlockHasher
from mlserve.cache.manager import CacheManager
from mlserve.config import SchedulerConfig
from mlserve.engine.scheduler import Scheduler
from mlserve.engine.sequence import EngineRequest, Sequence
from mlserve.model.plan import StepResult
from mlserve.request import RequestMetrics, SamplingParams

BLOCK_SIZE = 16
STEPS = 160  # ten blocks fill for every sequence


def decode_step_ms(running: int, prompt_tokens: int, spare_blocks: int, caching: bool) -> float:
    """Mean milliseconds of plan + commit over `STEPS` decode steps."""
    per_sequence = (prompt_tokens + STEPS) // BLOCK_SIZE + 2
    hasher = BlockHasher("xxh3_128", b"model-digest-0123", "float32", BLOCK_SIZE) if caching else None
    cache = CacheManager(BlockPool(running * per_sequence + spare_blocks + 1), hasher, BLOCK_SIZE)
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=running, max_num_batched_tokens=running * (prompt_tokens + 1)), cache, SlotTable(8)
    )
    params = SamplingParams(max_tokens=10**6)
    for i in range(running):
        token_ids = [i, *range(1, prompt_tokens)]
        request = EngineRequest(str(i), token_ids, params, RequestMetrics(0.0))
        sequence = Sequence(request, 0, token_ids, cache.open(token_ids), 0, 10**9, (0, i, 0))
        request.sequences.append(sequence)
        scheduler.add(sequence)
    seconds = 0.0
    for step in range(STEPS + 1):
        begin = time.perf_counter()
        plan = scheduler.plan()
        result = StepResult(dict.fromkeys(plan.sampled, 7))
        scheduler.commit(plan, result)
        seconds += (time.perf_counter() - begin) if step else 0.0  # the first step is the prefill
        assert len(plan.sequences) == running
    return 1e3 * seconds / STEPS


def main() -> None:
    print("decode step of scheduler + pool, ms (median of 5)")
    for running, prompt_tokens, spare in (
        (1, 64, 0), (16, 64, 0), (64, 64, 0), (256, 64, 0), (256, 1024, 0), (256, 64, 100_000), (1024, 64, 0),
    ):  # fmt: skip
        figures = {
            caching: statistics.median(decode_step_ms(running, prompt_tokens, spare, caching) for _ in range(5))
            for caching in (True, False)
        }
        print(
            f"  {running:5d} running, prompts of {prompt_tokens:5d} tokens, {spare:6d} spare blocks: "
            f"caching {figures[True]:.3f}, no caching {figures[False]:.3f}"
        )


if __name__ == "__main__":
    main()

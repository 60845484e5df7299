"""Engines over fake models, for tests of scheduling and of the cache."""

from __future__ import annotations

import hashlib
from typing import Any

from fake_adapters import FakeRegistry

from mlserve.adapters.slot_table import SlotTable
from mlserve.cache.block_pool import BlockPool
from mlserve.cache.hashing import BlockHasher, get_block_hash
from mlserve.cache.manager import CacheManager
from mlserve.config import SchedulerConfig
from mlserve.engine.admission import Limits
from mlserve.engine.engine import Engine, Runner
from mlserve.engine.tokenizer import Tokenizer
from mlserve.request import RequestOptions, RequestOutput, SamplingParams, StreamOutput

MAX_STEPS = 10_000


def make_cache(num_blocks: int = 64, block_size: int = 4, caching: bool = True) -> CacheManager:
    """A pool of `num_blocks` usable blocks."""
    hasher = BlockHasher(get_block_hash("xxh3_128"), hashlib.sha256(b"model").digest(), "float32", block_size)
    return CacheManager(BlockPool(num_blocks + 1), hasher if caching else None, block_size)


def make_engine(
    runner: Runner,
    tokenizer: Tokenizer,
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    caching: bool = True,
    max_model_len: int = 512,
    vocab_size: int = 256,
    eos: tuple[int, ...] = (),
    adapters: FakeRegistry | None = None,
    max_loras: int = 2,
    **scheduler: object,
) -> Engine:
    """An engine whose pool is checked after every step by `run`."""
    cache = make_cache(num_blocks, block_size, caching)
    limits = Limits(vocab_size, max_model_len, num_blocks * block_size, eos)
    options = {"max_num_seqs": 32, "max_num_batched_tokens": 64, **scheduler}
    registry: Any = FakeRegistry() if adapters is None else adapters
    return Engine(runner, tokenizer, cache, SchedulerConfig(**options), limits, registry, SlotTable(max_loras))


def submit(engine: Engine, request_id: str, prompt: object, params: SamplingParams, **how: object) -> None:
    engine.submit(engine.prepare(request_id, prompt, params, RequestOptions(**how)))


def step(engine: Engine) -> list[StreamOutput]:
    """One step, with the pool's invariants checked behind it."""
    outputs = engine.step()
    engine.cache.check()
    engine.scheduler.slots.check()
    return outputs


def run(engine: Engine) -> dict[str, RequestOutput]:
    """Step until idle; nothing may be left behind."""
    completed = {}
    for _ in range(MAX_STEPS):
        if not engine.has_work():
            break
        for output in step(engine):
            if output.completed is not None:
                completed[output.request_id] = output.completed
    assert not engine.has_work(), "the engine did not come to rest"
    assert engine.cache.stats().num_referenced == 0
    return completed


def generate(engine: Engine, prompt: object, params: SamplingParams, **how: object) -> RequestOutput:
    """One request, alone."""
    submit(engine, "only", prompt, params, **how)
    return run(engine)["only"]

"""Milliseconds to key a prompt, token checks included: `python -m tests.bench.bench_hashing`.

Marks: "two" is an adapter over everything and a salt from token 50 on; "images" is an adapter and an image of 893
tokens in every 1,000. The last table is decoding: one more block behind a long context.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from functools import partial

from mlserve.cache.hashing import BLOCK_HASHES, BlockHasher, BlockKey
from mlserve.cache.marks import Mark, MarkKind, salt_mark

BLOCK_SIZE = 16
LENGTHS = (1_000, 10_000, 100_000)
REPEATS = 15
ADAPTER = Mark(MarkKind.ADAPTER, b"a" * 32, 0, None)


def mark_mixes(length: int) -> dict[str, tuple[Mark, ...]]:
    """What may lie over a prompt."""
    images = [Mark(MarkKind.IMAGE, bytes([at // 1000] * 32), at + 7, at + 900) for at in range(0, length, 1000)]
    return {"none": (), "two": (ADAPTER, salt_mark("tenant", 50)), "images": (ADAPTER, *images)}


def milliseconds(work: Callable[[], object]) -> tuple[float, float]:
    """Best and median."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - start))
    return min(times), statistics.median(times)


def key_all(hasher: BlockHasher, token_ids: list[int], marks: tuple[Mark, ...]) -> None:
    """Key a prompt from the start."""
    hasher.extend([], [], token_ids, marks)


def main() -> None:
    """Print both tables."""
    choices = random.Random(0)
    print(f"block size {BLOCK_SIZE}; best / median of {REPEATS}, ms\n")
    print(f"{'tokens':>8} {'hash':<10}" + "".join(f"{name:>16}" for name in mark_mixes(0)))
    for length in LENGTHS:
        token_ids = [choices.randrange(150_000) for _ in range(length)]
        for name in BLOCK_HASHES:
            hasher = BlockHasher(name, b"m" * 32, "float32", BLOCK_SIZE)
            cells = []
            for marks in mark_mixes(length).values():
                best, median = milliseconds(partial(key_all, hasher, token_ids, marks))
                cells.append(f"{best:.2f} / {median:.2f}")
            print(f"{length:>8} {name:<10}" + "".join(f"{cell:>16}" for cell in cells))
    print("\none more block while decoding, us")
    token_ids = [choices.randrange(150_000) for _ in range(4096)]
    for name in BLOCK_HASHES:
        hasher = BlockHasher(name, b"m" * 32, "float32", BLOCK_SIZE)
        for label, marks in mark_mixes(4096).items():
            print(f"{name:<10} {label:<8} {decode_microseconds(hasher, token_ids, marks):.1f}")


def decode_microseconds(hasher: BlockHasher, token_ids: list[int], marks: tuple[Mark, ...]) -> float:
    """Best time for the last block of `token_ids` when all before are keyed."""
    keys: list[BlockKey] = []
    contents: list[bytes] = []
    hasher.extend(keys, contents, token_ids, marks)
    best = float("inf")
    for _ in range(200):
        keys.pop()
        contents.pop()
        start = time.perf_counter()
        hasher.extend(keys, contents, token_ids, marks)
        best = min(best, time.perf_counter() - start)
    return 1e6 * best


if __name__ == "__main__":
    main()

"""Random numbers that depend on nothing but a seed and a position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["uniforms"]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, odd


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One number in [0, 1) for each pair of a 64-bit seed and a position, with 53 random bits.

    Stateless, so a token's number is the same whatever shares the batch, and again when it is computed anew. The mix is
    SplitMix64's (Steele, Lea, Flood 2014): its output number `position`, from a state that the seed was mixed into.
    """
    state = _mix(np.array(seeds, dtype=np.uint64)) + np.array(positions, dtype=np.uint64) * GOLDEN
    bits: NDArray[np.float64] = (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return bits


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + GOLDEN  # arrays wrap around silently
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

"""Random request sequences against the radix-tree oracle, and against simulated memory."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from cache_world import WEIGHTED, CacheWorld, Op
from hypothesis import given, settings
from hypothesis import strategies as st
from radix_oracle import RadixOracle

OPERATIONS = st.lists(st.tuples(st.sampled_from(WEIGHTED), st.integers(0, 2**16)), min_size=10, max_size=50)


@dataclass(frozen=True)
class WeakHash:
    """A 128-bit digest that takes only a few values, so that nearly everything collides."""

    num_values: int
    name: str = "weak"

    def digest(self, data: bytes | memoryview, /) -> bytes:
        return bytes([sum(data) % self.num_values]) * 16


@settings(max_examples=1500, deadline=None)
@given(num_blocks=st.integers(3, 14), operations=OPERATIONS)
def test_pool_is_a_radix_tree_with_leaf_lru(num_blocks: int, operations: list[tuple[Op, int]]) -> None:
    world = CacheWorld(num_blocks, "xxh3_128", RadixOracle(num_blocks - 1))
    for op, number in operations:
        world.apply(op, number)
    world.finish_all()


@settings(max_examples=500, deadline=None)
@given(num_blocks=st.integers(3, 14), num_values=st.integers(1, 3), operations=OPERATIONS)
def test_colliding_keys_never_give_wrong_kv(num_blocks: int, num_values: int, operations: list[tuple[Op, int]]) -> None:
    world = CacheWorld(num_blocks, WeakHash(num_values))
    for op, number in operations:
        world.apply(op, number)
    world.finish_all()


@settings(max_examples=200, deadline=None)
@given(num_blocks=st.integers(3, 14), operations=OPERATIONS)
def test_without_prefix_caching_nothing_is_named(num_blocks: int, operations: list[tuple[Op, int]]) -> None:
    world = CacheWorld(num_blocks, None)
    for op, number in operations:
        world.apply(op, number)
        assert world.manager.stats().num_cached == 0
    world.finish_all()


@pytest.mark.parametrize("seed", range(4))
def test_long_runs_agree_with_the_radix_tree(seed: int) -> None:
    choices = random.Random(seed)
    num_blocks = choices.randint(12, 30)
    world = CacheWorld(num_blocks, "sha256", RadixOracle(num_blocks - 1))
    for _ in range(2000):
        world.apply(choices.choice(WEIGHTED), choices.getrandbits(32))
    world.finish_all()
    assert world.manager.stats().num_evicted > 50
    assert world.manager.stats().hit_tokens > 100

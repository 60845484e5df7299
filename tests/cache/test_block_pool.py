"""The pool: references, names, and the exact order of eviction."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mlserve.cache.block_pool import BlockPool
from mlserve.cache.hashing import BlockKey
from mlserve.errors import ConfigError


def key(text: str) -> BlockKey:
    return BlockKey(text.encode())


def cached(pool: BlockPool, prefix: str) -> list[int]:
    """A referenced table whose blocks are named like the beginnings of `prefix`."""
    table = pool.take(len(prefix))
    for at, block_id in enumerate(table):
        parent = table[at - 1] if at else 0
        assert pool.publish(block_id, key(prefix[: at + 1]), parent, prefix[at].encode()) == block_id
    return table


def look_up(pool: BlockPool, prefix: str) -> list[int | None]:
    found: list[int | None] = []
    for at, letter in enumerate(prefix):
        found.append(pool.lookup(key(prefix[: at + 1]), (found[-1] or -1) if found else 0, letter.encode()))
    return found


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_a_pool_needs_a_block_besides_block_0(num_blocks: int) -> None:
    with pytest.raises(ConfigError, match=f"num_blocks is {num_blocks}: give at least 2"):
        BlockPool(num_blocks)


def test_block_0_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert pool.num_free == 4
    assert pool.take(4) == [1, 2, 3, 4]
    assert pool.num_free == 0
    assert pool.num_referenced == 4


def test_asking_and_taking_agree() -> None:
    pool = BlockPool(4)
    assert [pool.can_take(count) for count in (0, 3, 4)] == [True, True, False]
    with pytest.raises(RuntimeError, match="4 blocks wanted, 3 are free: ask can_take first"):
        pool.take(4)
    assert pool.free_ids() == [1, 2, 3]
    assert pool.take(0) == []


def test_released_without_a_name_a_block_is_handed_out_first() -> None:
    pool = BlockPool(7)
    pool.release(cached(pool, "ab"))
    table = pool.take(3)
    assert table == [3, 4, 5]
    pool.release(table)
    assert pool.free_ids() == [3, 4, 5, 6, 2, 1]


def test_one_release_becomes_evictable_tail_first() -> None:
    pool = BlockPool(6)
    pool.take(2)
    pool.release(cached(pool, "abc"))
    assert pool.free_ids() == [5, 4, 3]
    pool.check([[1, 2]])


def test_least_recently_released_goes_first() -> None:
    pool = BlockPool(7)
    first, second, third = cached(pool, "ab"), cached(pool, "cd"), cached(pool, "ef")
    for table in (second, first, third):
        pool.release(table)
    assert pool.free_ids() == [4, 3, 2, 1, 6, 5]
    assert pool.take(3) == [4, 3, 2]
    assert look_up(pool, "cd") == [None, None]
    assert look_up(pool, "ab") == [1, None]
    assert pool.num_evicted == 3
    assert pool.num_cached == 3


def test_a_hit_makes_a_free_block_referenced_and_recent() -> None:
    pool = BlockPool(5)
    pool.release(cached(pool, "ab"))
    pool.release(cached(pool, "cd"))
    assert pool.count_free([1, 2]) == 2
    pool.share([1, 2])
    assert pool.free_ids() == [4, 3]
    assert pool.count_free([1, 3]) == 1
    pool.release([1, 2])
    assert pool.free_ids() == [4, 3, 2, 1]


def test_a_lookup_is_not_a_use() -> None:
    pool = BlockPool(5)
    pool.release(cached(pool, "ab"))
    pool.release(cached(pool, "cd"))
    assert look_up(pool, "ab") == [1, 2]
    assert pool.free_ids() == [2, 1, 4, 3]


def test_a_shared_block_stays_until_its_last_release() -> None:
    pool = BlockPool(4)
    table = cached(pool, "ab")
    pool.share(table[:1])
    pool.release(table)
    assert pool.free_ids() == [3, 2]
    pool.check([[1]])
    pool.release([1])
    assert pool.free_ids() == [3, 2, 1]


def test_a_hit_is_confirmed_by_content_and_parent() -> None:
    pool = BlockPool(5)
    first, second = pool.take(2)
    pool.publish(first, key("k"), 0, b"content")
    assert pool.lookup(key("k"), 0, b"content") == first
    assert pool.lookup(key("k"), 0, b"other") is None
    assert pool.lookup(key("k"), second, b"content") is None
    assert pool.lookup(key("l"), 0, b"content") is None


def test_a_colliding_name_is_not_given() -> None:
    pool = BlockPool(4)
    first, second = pool.take(2)
    assert pool.publish(first, key("k"), 0, b"one") == first
    assert pool.publish(second, key("k"), 0, b"other") is None
    assert pool.key_of(second) is None
    assert pool.lookup(key("k"), 0, b"one") == first
    pool.check([[first, second]])


def test_an_equal_name_belongs_to_one_block() -> None:
    pool = BlockPool(4)
    first, second = pool.take(2)
    assert pool.publish(first, key("k"), 0, b"same") == first
    assert pool.publish(second, key("k"), 0, b"same") == first
    assert pool.publish(first, key("k"), 0, b"same") == first
    assert (pool.key_of(first), pool.key_of(second)) == (key("k"), None)


def test_a_taken_block_has_lost_its_name() -> None:
    pool = BlockPool(2)
    pool.release(cached(pool, "a"))
    assert pool.take(1) == [1]
    assert pool.key_of(1) is None
    assert pool.publish(1, key("b"), 0, b"b") == 1
    assert look_up(pool, "a") == [None]
    pool.check([[1]])


def test_reset_forgets_free_and_referenced_names() -> None:
    pool = BlockPool(6)
    pool.release(cached(pool, "ab"))
    held = cached(pool, "xyz")
    assert pool.reset() is False
    assert pool.num_cached == 0
    assert look_up(pool, "ab") == [None, None]
    assert look_up(pool, "x") == [None]
    pool.check([held])
    pool.release(held)
    assert pool.num_free == 5
    assert pool.reset() is True
    assert pool.num_evicted == 0


def test_misuse_raises() -> None:
    pool = BlockPool(3)
    with pytest.raises(RuntimeError, match="block 1 is released but has no reference"):
        pool.release([1])
    with pytest.raises(RuntimeError, match="-1 blocks wanted"):
        pool.take(-1)
    with pytest.raises(KeyError):
        pool.share([2])


def test_generation_changes_when_found_blocks_may_be_others() -> None:
    pool = BlockPool(4)
    before = pool.generation
    pool.take(0)
    pool.release(cached(pool, "a"))
    after = pool.generation
    assert after > before
    look_up(pool, "a")
    pool.share([1])
    pool.release([1])
    assert pool.generation == after
    pool.reset()
    assert pool.generation > after


def _lose_a_block(pool: BlockPool) -> None:
    pool._free.pop_named()


def _miscount(pool: BlockPool) -> None:
    pool._references[1] += 1


def _forget_key_only(pool: BlockPool) -> None:
    pool._keys[1] = None


def _orphan(pool: BlockPool) -> None:
    pool._forget(3)


def _reverse_queue(pool: BlockPool) -> None:
    pool._free._named.move_to_end(4)


def _hold_child_without_parent(pool: BlockPool) -> None:
    pool._free.remove_named(4)
    pool._references[4] = 1


@pytest.mark.parametrize(
    ("damage", "tables"),
    [
        (_lose_a_block, [[1, 2]]),
        (_miscount, [[1, 2]]),
        (_forget_key_only, [[1, 2]]),
        (_orphan, [[1, 2]]),
        (_reverse_queue, [[1, 2]]),
        (_hold_child_without_parent, [[1, 2], [4]]),
    ],
)
def test_check_finds_damage(damage: object, tables: Sequence[Sequence[int]]) -> None:
    pool = BlockPool(6)
    cached(pool, "ab")
    pool.release(cached(pool, "cd"))
    pool.check([[1, 2]])
    damage(pool)  # type: ignore[operator]
    with pytest.raises(AssertionError):
        pool.check(tables)


def test_work_does_not_grow_with_the_pool() -> None:
    """Counted, not timed: evicting and hitting touch the blocks concerned, whatever else is cached."""
    pool = BlockPool(20_001)
    for number in range(10_000):
        pool.release(cached(pool, chr(1000 + number) + "x"))
    forgotten = []
    forget = pool._forget
    pool._forget = lambda block_id: (forgotten.append(block_id), forget(block_id))[1]  # type: ignore[method-assign]
    assert pool.take(3) == [2, 1, 4]
    assert forgotten == [2, 1, 4]

"""The order of eviction, and the policies that it is not. `docs/prefix-caching.md` tells the same examples."""

from __future__ import annotations

import pytest

from mlserve.cache.block_pool import BlockPool
from mlserve.cache.eviction import FreeBlocks
from mlserve.cache.hashing import BlockHasher, BlockKey
from mlserve.cache.manager import CacheManager, SequenceBlocks


def test_blank_blocks_go_before_named_ones() -> None:
    free = FreeBlocks([1, 2, 3])
    free.add_named(9)
    assert (list(free), len(free)) == ([1, 2, 3, 9], 4)
    assert free.pop_blank(2) == [1, 2]
    assert free.pop_blank(5) == [3]
    assert free.pop_blank(1) == []
    free.add_blank(7)
    assert list(free) == [7, 9]
    assert free.pop_named() == 9


def test_blank_blocks_freed_last_go_first() -> None:
    free = FreeBlocks([1])
    free.add_blank(5)
    free.add_blank(6)
    assert free.pop_blank(3) == [6, 5, 1]


def test_named_blocks_go_in_the_order_in_which_they_became_free() -> None:
    free = FreeBlocks([])
    for block_id in (4, 2, 6, 3):
        free.add_named(block_id)
    free.remove_named(2)
    free.add_named(2)
    assert list(free.named) == [4, 6, 3, 2]
    assert [free.pop_named() for _ in range(4)] == [4, 6, 3, 2]
    with pytest.raises(KeyError):
        free.pop_named()


def test_without_names_blocks_are_blank_and_keep_their_order() -> None:
    free = FreeBlocks([1])
    for block_id in (4, 2, 6):
        free.add_named(block_id)
    free.forget_names()
    assert list(free) == [4, 2, 6, 1]
    assert free.pop_blank(4) == [4, 2, 6, 1]


def test_each_release_has_its_own_time() -> None:
    """Were all releases of one step equally old, the longest prefix of them all would go first: 4, 3, then a tie."""
    pool = BlockPool(6)
    short, long = _named(pool, "a"), _named(pool, "bcd")
    pool.release(short)
    pool.release(long)
    assert pool.free_ids() == [5, 1, 4, 3, 2]


def test_duplicates_that_are_kept_make_a_prefix_look_older_than_it_is() -> None:
    """Two compute `p` at once, `c` ends in between. A tree touches `p` when the second ends, so `c` is older."""
    pool = BlockPool(4)
    first, between, second = (pool.take(1) for _ in range(3))
    for table, name in ((first, "p"), (between, "c"), (second, "p")):
        pool.publish(table[0], BlockKey(name.encode()), 0, name.encode())
    for table in (first, between, second):
        pool.release(table)
    assert _names(pool) == ["p", "c"]

    manager = CacheManager(BlockPool(4), BlockHasher("sha256", b"m", "float32", 1), 1)
    seqs = [_admitted(manager, token) for token in (ord("p"), ord("c"), ord("p"))]
    for seq in seqs:
        manager.commit(seq, 1)
    for seq in seqs:
        manager.release(seq)
    order = [manager.pool.key_of(block_id) for block_id in manager.pool.free_ids()]
    assert order == [None, seqs[1].keys[0], seqs[0].keys[0]]


def _admitted(manager: CacheManager, token: int) -> SequenceBlocks:
    seq = manager.open([token])
    manager.admit(seq, manager.find(seq), 1)
    return seq


def _named(pool: BlockPool, prefix: str) -> list[int]:
    table = pool.take(len(prefix))
    for at, block_id in enumerate(table):
        pool.publish(block_id, BlockKey(prefix[: at + 1].encode()), table[at - 1] if at else 0, b"")
    return table


def _names(pool: BlockPool) -> list[str]:
    keys = [pool.key_of(block_id) for block_id in pool.free_ids()]
    return [key.decode() for key in keys if key is not None]

"""Tables of sequences over the pool."""

from __future__ import annotations

import hashlib

import pytest

from mlserve.cache.block_pool import BlockPool
from mlserve.cache.hashing import BlockHash, BlockHasher, pack_tokens
from mlserve.cache.manager import CacheManager, CacheStats, Hit, SequenceBlocks
from mlserve.cache.marks import Mark, MarkKind, salt_mark
from mlserve.errors import ConfigError, PromptError


def manager_of(usable: int, block_size: int = 4, block_hash: str | BlockHash | None = "xxh3_128") -> CacheManager:
    """A manager over `usable` blocks."""
    hasher = BlockHasher(block_hash, b"m" * 32, "float32", block_size) if block_hash else None
    return CacheManager(BlockPool(usable + 1), hasher, block_size)


def start(manager: CacheManager, token_ids: list[int], *marks: Mark) -> tuple[SequenceBlocks, int]:
    """Admit a sequence with its whole prompt; returns it and how many tokens were cached."""
    seq = manager.open(token_ids, marks)
    hit = manager.find(seq)
    assert manager.can_admit(hit, len(token_ids))
    manager.admit(seq, hit, len(token_ids))
    manager.check()
    return seq, hit.num_tokens


def finish(manager: CacheManager, seq: SequenceBlocks) -> None:
    """All tokens are computed; the sequence ends."""
    manager.commit(seq, len(seq.token_ids))
    manager.check()
    manager.release(seq)
    manager.check()


def serve(manager: CacheManager, token_ids: list[int], *marks: Mark) -> int:
    seq, num_cached = start(manager, token_ids, *marks)
    finish(manager, seq)
    return num_cached


def ids(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))


def test_block_sizes_must_agree() -> None:
    with pytest.raises(ConfigError, match="hasher's block_size is 4, the manager's 8"):
        CacheManager(BlockPool(4), BlockHasher("sha256", b"m", "float32", 4), 8)


@pytest.mark.parametrize(("block_size", "length"), [(4, 8), (1, 1), (1, 5), (16, 16), (16, 32)])
def test_1_01_a_fully_cached_prompt_still_computes_its_last_token(block_size: int, length: int) -> None:
    manager = manager_of(8, block_size)
    assert serve(manager, ids(1, length)) == 0
    seq, num_cached = start(manager, ids(1, length))
    assert num_cached == length - block_size
    before = list(seq.table)
    manager.commit(seq, length)
    assert manager.stats().num_referenced == len(seq.table)
    # The last block was computed anew, and then given up for the equal one that had been there before.
    assert seq.table[:-1].tolist() == before[:-1]
    assert seq.table[-1] != before[-1]
    manager.check()


def test_1_06_an_adapter_and_a_salt_of_the_same_bytes_never_meet() -> None:
    adapter, salt = Mark(MarkKind.ADAPTER, salt_mark("X").digest, 0, None), salt_mark("X")
    for one, other in ((adapter, salt), (salt, adapter)):
        manager = manager_of(16)
        assert [serve(manager, ids(1, 12), mark) for mark in (one, other, one)] == [0, 0, 8]


def test_1_07_equal_blocks_become_one_and_the_key_table_stays_small() -> None:
    manager = manager_of(8)
    first, second = start(manager, ids(1, 8))[0], start(manager, ids(1, 8))[0]
    assert not {*first.table} & {*second.table}
    for seq in (first, second):
        manager.commit(seq, 8)
        manager.check()
    assert first.table == second.table
    assert manager.stats().num_cached == manager.stats().num_referenced == 2
    manager.release(first)
    manager.release(second)
    for number in range(200):
        assert serve(manager, [1000 + number] * 8) == 0
        assert manager.stats().num_cached <= 8
    assert serve(manager, ids(1, 8)) == 0
    assert manager.stats().num_referenced == 0
    assert manager.reset() is True
    assert manager.stats().num_cached == 0


def test_1_08_no_name_before_the_kv_is_written() -> None:
    manager = manager_of(6)
    seq = start(manager, ids(1, 16))[0]  # scheduled; then the step raises
    assert manager.stats().num_cached == 0
    assert manager.find(manager.open(ids(1, 16))).num_tokens == 0
    manager.release(seq)
    assert serve(manager, ids(1, 16)) == 0
    assert manager.stats().num_cached == 4


def test_1_10_the_end_of_the_longest_prefix_goes_first() -> None:
    manager = manager_of(6)
    assert serve(manager, ids(1, 16)) == 0
    assert serve(manager, ids(100, 110)) == 0
    assert manager.stats().num_evicted == 1
    assert serve(manager, ids(1, 16)) == 12


def test_3_07_two_images_behind_one_text() -> None:
    token_ids = [1, 2, 3, 4, 9, 9, 9, 9, 5, 6, 7, 8, 10]
    manager = manager_of(16)
    one, other = (Mark(MarkKind.IMAGE, digest * 16, 4, 8) for digest in (b"i", b"j"))
    assert [serve(manager, token_ids, image) for image in (one, other, one)] == [0, 4, 12]


def test_a_chunk_publishes_what_it_filled() -> None:
    manager = manager_of(8)
    seq = manager.open(ids(1, 18))
    manager.admit(seq, manager.find(seq), 6)
    published = []
    for computed in (6, 12, 18):
        assert manager.can_extend(seq, computed)
        manager.extend(seq, computed)
        manager.commit(seq, computed)
        manager.check()
        published.append((len(seq.table), manager.stats().num_cached))
    assert published == [(2, 1), (3, 3), (5, 4)]


def test_decoded_blocks_are_cached_when_they_fill() -> None:
    manager = manager_of(8)
    token_ids = ids(1, 7)
    seq = start(manager, token_ids)[0]
    manager.commit(seq, 7)
    for token in (50, 51, 52):
        token_ids.append(token)
        manager.extend(seq, len(token_ids))
        manager.commit(seq, len(token_ids))
        manager.check()
    manager.release(seq)
    assert manager.find(manager.open([*ids(1, 7), 50, 51, 52, 53])).num_tokens == 8


def test_preempted_sequences_find_their_own_blocks_again() -> None:
    manager = manager_of(4)
    seq = start(manager, ids(1, 14))[0]
    manager.commit(seq, 14)
    manager.release(seq)
    assert len(seq.table) == 0
    seq.token_ids.append(99)
    hit = manager.find(seq)
    assert (hit.num_tokens, hit.num_free) == (12, 3)
    manager.admit(seq, hit, 15)
    manager.commit(seq, 15)
    manager.check()


def test_free_blocks_of_a_hit_leave_the_free_ones() -> None:
    manager = manager_of(4)
    serve(manager, ids(1, 13))
    seq = manager.open([*ids(1, 12), *ids(50, 54)])
    hit = manager.find(seq)
    assert (list(hit.block_ids), hit.num_tokens, hit.num_free) == ([1, 2, 3], 12, 3)
    assert manager.pool.num_free == 4
    assert manager.can_admit(hit, 16)
    assert not manager.can_admit(hit, 17)
    with pytest.raises(RuntimeError, match="no 5 blocks for 17 tokens: ask can_admit first"):
        manager.admit(seq, hit, 17)
    manager.check()
    assert manager.stats().num_referenced == 0


def test_hits_go_stale() -> None:
    manager = manager_of(4)
    serve(manager, ids(1, 9))
    seq = manager.open(ids(1, 9))
    for spoil in (lambda: serve(manager, ids(100, 108)), manager.reset):
        hit = manager.find(seq)
        assert hit.block_ids
        spoil()
        for act in (lambda hit=hit: manager.can_admit(hit, 9), lambda hit=hit: manager.admit(seq, hit, 9)):
            with pytest.raises(RuntimeError, match="since this hit was found"):
                act()
        serve(manager, ids(1, 9))


def test_acting_out_of_turn_is_refused() -> None:
    manager = manager_of(8)
    seq = start(manager, ids(1, 8))[0]
    with pytest.raises(RuntimeError, match="already holds 2 blocks"):
        manager.admit(seq, Hit((), 0, 0), 8)
    manager.commit(seq, 8)
    other = manager.open(ids(1, 9))
    hit = manager.find(other)
    with pytest.raises(RuntimeError, match="a table of 8 tokens for a hit of 8"):
        manager.admit(other, hit, 8)
    assert not manager.can_extend(seq, 33)
    with pytest.raises(RuntimeError, match="7 blocks wanted, 6 are free"):
        manager.extend(seq, 33)
    manager.check()


def test_tokens_that_cannot_be_hashed_are_refused() -> None:
    manager = manager_of(8)
    with pytest.raises(PromptError, match="token id True is of type bool"):
        manager.find(manager.open([1, True, 3, 4]))


def test_releasing_twice_does_nothing() -> None:
    manager = manager_of(4)
    seq = start(manager, ids(1, 4))[0]
    finish(manager, seq)
    manager.release(seq)
    assert manager.pool.num_free == 4


@pytest.mark.parametrize("block_hash", ["xxh3_128", None])
def test_siblings_share_the_computed_prompt(block_hash: str | None) -> None:
    manager = manager_of(8, block_hash=block_hash)
    prompt = ids(1, 10)
    source = start(manager, list(prompt))[0]
    manager.commit(source, 10)
    source.token_ids += [50, 51]
    target = manager.open(list(prompt))
    hit = manager.find_sibling(source, target, len(prompt))
    assert (list(hit.block_ids), hit.num_tokens, hit.num_free) == ([1, 2], 8, 0)
    manager.admit(target, hit, 10)
    manager.check()
    assert target.table.tolist() == [1, 2, 4]
    finish(manager, source)
    finish(manager, target)
    assert manager.stats().num_referenced == 0


def test_a_sibling_computes_at_least_its_last_token() -> None:
    manager = manager_of(8, block_hash=None)
    source = start(manager, ids(1, 8))[0]
    manager.commit(source, 8)
    assert manager.find_sibling(source, manager.open(ids(1, 8)), 8).num_tokens == 4


def test_a_sibling_takes_over_only_what_is_computed() -> None:
    manager = manager_of(8)
    source = start(manager, ids(1, 10))[0]
    manager.commit(source, 6)
    assert manager.find_sibling(source, manager.open(ids(1, 10)), 10).num_tokens == 4


def test_a_sibling_takes_over_no_name_of_what_differs() -> None:
    manager = manager_of(8)
    source = start(manager, [*ids(1, 10), 50, 51])[0]
    manager.commit(source, 12)
    target = manager.open(ids(1, 10))
    manager.admit(target, manager.find_sibling(source, target, 10), 10)
    target.token_ids += [60, 61]
    manager.commit(target, 12)
    manager.check()
    assert (source.table[:2], source.table[2]) == (target.table[:2], 3)
    assert target.table[2] != 3
    assert manager.stats().num_cached == 4


def test_siblings_must_begin_alike() -> None:
    manager = manager_of(8)
    source = start(manager, ids(1, 8))[0]
    for token_ids, marks in ((ids(2, 9), ()), (ids(1, 8), (salt_mark("x"),))):
        with pytest.raises(ValueError, match="differ within their first 8 tokens"):
            manager.find_sibling(source, manager.open(token_ids, marks), 8)


def test_reset_keeps_running_sequences_apart_from_new_ones() -> None:
    manager = manager_of(12)
    old = start(manager, ids(1, 10))[0]
    manager.commit(old, 5)
    assert manager.reset() is False
    manager.commit(old, 10)
    manager.check()
    assert manager.stats().num_cached == 0
    sibling = manager.open(ids(1, 10))
    manager.admit(sibling, manager.find_sibling(old, sibling, 10), 10)
    manager.commit(sibling, 10)
    assert manager.stats().num_cached == 0
    assert serve(manager, ids(1, 10)) == 0
    assert manager.find(manager.open(ids(1, 10))).num_tokens == 8
    manager.release(old)
    manager.release(sibling)
    manager.check()
    assert manager.reset() is True


class Constant:
    """Every key collides, with the root too."""

    name = "constant"

    def digest(self, data: bytes | memoryview, /) -> bytes:
        return b"k" * 16


def test_colliding_blocks_are_misses() -> None:
    manager = manager_of(12, block_hash=Constant())
    assert serve(manager, [1] * 12) == 0
    assert manager.stats().num_cached == 1  # the second block's key is taken: neither it nor the third is named
    assert serve(manager, [1] * 12) == 4  # though keys and contents of all three are equal
    assert serve(manager, [2] * 12) == 0
    assert serve(manager, [1] * 4 + [2] * 8) == 4


def test_behind_a_collision_nothing_is_named() -> None:
    class FirstBlocksCollide:
        name = "first"

        def digest(self, data: bytes | memoryview, /) -> bytes:
            first = bytes(data[-16:]) in (pack_tokens([1] * 4), pack_tokens([2] * 4))
            return b"k" * 16 if first else hashlib.sha256(data).digest()[:16]

    manager = manager_of(12, block_hash=FirstBlocksCollide())
    assert serve(manager, [1] * 4 + [5] * 8) == 0
    assert manager.stats().num_cached == 3
    assert serve(manager, [2] * 4 + [6] * 8) == 0
    assert manager.stats().num_cached == 3
    assert serve(manager, [1] * 4 + [6] * 8) == 4


def test_nothing_is_hashed_without_prefix_caching() -> None:
    manager = manager_of(4, block_hash=None)
    assert [serve(manager, ids(1, 9)) for _ in range(2)] == [0, 0]
    seq = start(manager, ids(1, 9))[0]
    assert (seq.keys, seq.contents) == ([], [])
    assert manager.stats().num_cached == 0


def test_keys_are_computed_once() -> None:
    digested = []

    class Counting:
        name = "counting"

        def digest(self, data: bytes | memoryview, /) -> bytes:
            digested.append(bytes(data))
            return bytes(data)[-16:].rjust(16)

    manager = manager_of(8, block_hash=Counting())
    digested.clear()
    seq = manager.open(ids(1, 12))
    for _ in range(5):
        manager.find(seq)
    manager.admit(seq, manager.find(seq), 12)
    manager.commit(seq, 12)
    assert len(digested) == 3


def test_what_one_writes_next_is_what_another_misses() -> None:
    manager = manager_of(8)
    first, second = manager.open(ids(1, 12)), manager.open([*ids(1, 8), 50, 51, 52, 53])
    manager.admit(first, manager.find(first), 12)
    upcoming = [manager.upcoming_key(first)]
    missing = [manager.missing_key(second, manager.find(second))]
    for computed in (4, 8, 12):
        manager.commit(first, computed)
        upcoming.append(manager.upcoming_key(first))
        missing.append(manager.missing_key(second, manager.find(second)))
    assert [key is not None and key == other for key, other in zip(upcoming, missing, strict=True)] == [
        True,
        True,
        False,  # the third blocks differ
        False,
    ]
    assert upcoming[3] is None  # nothing more is known of the first


def test_without_names_nothing_is_written_that_others_could_miss() -> None:
    for manager in (manager_of(8), manager_of(8, block_hash=None)):
        seq = start(manager, ids(1, 12))[0]
        manager.reset()
        assert manager.upcoming_key(seq) is None
    assert manager.missing_key(seq, Hit((), 0, 0)) is None


def test_stats_count_a_sequence_once() -> None:
    manager = manager_of(4)
    serve(manager, ids(1, 10))
    seq, _ = start(manager, ids(1, 10))
    manager.release(seq)
    manager.admit(seq, manager.find(seq), 10)
    manager.find(manager.open(ids(1, 10)))
    stats = manager.stats()
    expected = CacheStats(
        num_blocks=4, num_free=1, num_referenced=3, num_cached=2, num_evicted=0, query_tokens=20, hit_tokens=8
    )
    assert stats == expected
    assert stats.hit_rate == 0.4
    assert manager_of(4).stats().hit_rate == 0.0

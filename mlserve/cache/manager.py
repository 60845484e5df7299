"""The block tables of sequences: finding cached prefixes, growing, naming what was written, letting go.

One sequence's table, in tokens:

    [0, hit) shared, found in the cache | [hit, num_computed) written by us | [num_computed, end of table) to be written
    [0, num_published * block_size) named: others can hit it

The scheduler asks before it acts: `find`, `can_admit`, `admit`; `can_extend`, `extend`; after the step `commit`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mlserve.cache.block_pool import BlockPool
from mlserve.cache.hashing import BlockHasher, BlockKey
from mlserve.cache.marks import Mark
from mlserve.errors import ConfigError

__all__ = ["CacheManager", "CacheStats", "Hit", "SequenceBlocks"]


@dataclass(slots=True, eq=False)
class SequenceBlocks:
    """What the cache knows of one sequence. Made by `CacheManager.open`, which alone changes it."""

    token_ids: list[int]  # prompt and output: the caller's own list, which it appends to
    marks: tuple[Mark, ...]
    table: array[int] = field(default_factory=lambda: array("i"))  # block ids, in order; empty while it waits
    num_computed: int = 0  # tokens whose KV is written, as of the last commit
    num_published: int = 0  # blocks of the table that bear their names
    can_publish: bool = False  # False from a reset or a key collision on, until it is admitted again
    was_admitted: bool = False
    keys: list[BlockKey] = field(default_factory=list)  # of its full blocks, as far as they were needed
    contents: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Hit:
    """Blocks that hold the first `num_tokens` tokens of a sequence. Good until blocks are taken from the pool."""

    block_ids: Sequence[int]
    num_tokens: int
    num_free: int  # of these blocks, how many nobody references: they leave the free ones on admission
    generation: int = 0  # the pool's when it was found


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Figures of the pool and of the prefix cache; counts are since the start. Block 0 isn't counted."""

    num_blocks: int
    num_free: int  # can be handed out, cached ones included
    num_referenced: int  # in use by running sequences
    num_cached: int  # can be hit, in use or not
    num_evicted: int
    query_tokens: int  # tokens of the sequences that were admitted, when they were admitted first
    hit_tokens: int  # of these, how many were found in the cache or taken over from a sibling

    @property
    def hit_rate(self) -> float:
        """Share of tokens that needn't be computed, 0 to 1."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0


class CacheManager:
    """Keeps the block tables of all sequences over one pool. Without a hasher prefix caching is off: no block is named.

    Misuse (acting without asking, or out of turn) raises `RuntimeError` and changes nothing.
    """

    def __init__(self, pool: BlockPool, hasher: BlockHasher | None, block_size: int) -> None:
        if hasher is not None and hasher.block_size != block_size:
            raise ConfigError(f"the hasher's block_size is {hasher.block_size}, the manager's {block_size}: give one")
        self.pool = pool
        self.hasher = hasher
        self.block_size = block_size
        self._admitted: set[SequenceBlocks] = set()
        self._query_tokens = 0
        self._hit_tokens = 0

    def open(self, token_ids: list[int], marks: Sequence[Mark] = ()) -> SequenceBlocks:
        """Begin with a sequence. `token_ids` is shared: append output tokens to it, and change nothing else in it."""
        return SequenceBlocks(token_ids, tuple(marks))

    def find(self, seq: SequenceBlocks) -> Hit:
        """The longest cached prefix, short of the last token: that is always computed, because its logits are wanted.

        A question only: takes no reference, and isn't a use. Keys are computed once, so asking again is cheap.
        Raises `PromptError` for token ids that can't be hashed (see `BlockHasher.extend`).
        """
        if self.hasher is None:
            return Hit((), 0, 0)
        self.hasher.extend(seq.keys, seq.contents, seq.token_ids, seq.marks)
        block_ids: list[int] = []
        parent = 0
        limit = (len(seq.token_ids) - 1) // self.block_size
        for key, content in zip(seq.keys[:limit], seq.contents, strict=False):
            block_id = self.pool.lookup(key, parent, content)
            if block_id is None:
                break
            block_ids.append(block_id)
            parent = block_id
        return self._hit(block_ids)

    def find_sibling(self, source: SequenceBlocks, target: SequenceBlocks, num_tokens: int) -> Hit:
        """What `target` can take over from `source`: full computed blocks of the `num_tokens` that both begin with,
        short of target's last token. Works without prefix caching too, and for blocks that bear no name.

        Raises `ValueError` if the two don't begin alike.
        """
        if source.token_ids[:num_tokens] != target.token_ids[:num_tokens] or source.marks != target.marks:
            raise ValueError(f"the sequences differ within their first {num_tokens} tokens: only equal ones can share")
        shared = min(num_tokens, source.num_computed, len(target.token_ids) - 1) // self.block_size
        if not target.keys:
            target.keys, target.contents = source.keys[:shared], source.contents[:shared]
        return self._hit(source.table[:shared])

    def can_admit(self, hit: Hit, num_tokens: int) -> bool:
        """Whether there are blocks for a table of `num_tokens` tokens that begins with `hit`."""
        self._require_fresh(hit)
        wanted = self._blocks_for(num_tokens) - len(hit.block_ids)
        return self.pool.can_take(wanted + self.pool.count_free(hit.block_ids))

    def admit(self, seq: SequenceBlocks, hit: Hit, num_tokens: int) -> None:
        """Give the sequence a table of `num_tokens` tokens, more than the hit has. Ask `can_admit` first."""
        if seq.table:
            raise RuntimeError(f"the sequence already holds {len(seq.table)} blocks: release it before admitting it")
        if num_tokens <= hit.num_tokens:
            raise RuntimeError(
                f"a table of {num_tokens} tokens for a hit of {hit.num_tokens}: at least one is computed"
            )
        if not self.can_admit(hit, num_tokens):
            raise RuntimeError(f"no {self._blocks_for(num_tokens)} blocks for {num_tokens} tokens: ask can_admit first")
        self.pool.share(hit.block_ids)
        seq.table.extend(hit.block_ids)
        seq.table.extend(self.pool.take(self._blocks_for(num_tokens) - len(hit.block_ids)))
        self._admitted.add(seq)
        seq.num_computed = hit.num_tokens
        # A sibling's blocks bear no names after a reset or a collision; then ours could have no named parent.
        is_named = not hit.block_ids or self.pool.key_of(hit.block_ids[-1]) is not None
        seq.can_publish = self.hasher is not None and is_named
        seq.num_published = len(hit.block_ids) if seq.can_publish else 0
        if not seq.was_admitted:
            seq.was_admitted = True
            self._query_tokens += len(seq.token_ids)
            self._hit_tokens += hit.num_tokens

    def can_extend(self, seq: SequenceBlocks, num_tokens: int) -> bool:
        """Whether there are blocks for the table to hold `num_tokens` tokens in all."""
        return self.pool.can_take(self._blocks_for(num_tokens) - len(seq.table))

    def extend(self, seq: SequenceBlocks, num_tokens: int) -> None:
        """Grow the table to hold `num_tokens` tokens in all. Ask `can_extend` first."""
        wanted = self._blocks_for(num_tokens) - len(seq.table)
        if wanted > 0:
            seq.table.extend(self.pool.take(wanted))

    def commit(self, seq: SequenceBlocks, num_computed: int) -> None:
        """The KV of the first `num_computed` tokens is written: name the blocks that are full now.

        Needed only when a block has filled. Where an equal block already exists the table takes that one instead.
        """
        seq.num_computed = num_computed
        num_full = num_computed // self.block_size
        if num_full > seq.num_published and seq.can_publish:
            self._publish(seq, num_full)

    def release(self, seq: SequenceBlocks) -> None:
        """Give all blocks back; does nothing for a sequence without any. It can be found and admitted again later."""
        self.pool.release(seq.table)
        del seq.table[:]
        seq.num_computed = seq.num_published = 0
        seq.can_publish = False
        self._admitted.discard(seq)

    def missing_key(self, seq: SequenceBlocks, hit: Hit) -> BlockKey | None:
        """The name of the first full block that `hit`, just found, lacks."""
        return seq.keys[len(hit.block_ids)] if len(hit.block_ids) < len(seq.keys) else None

    def upcoming_key(self, seq: SequenceBlocks) -> BlockKey | None:
        """The name that an admitted sequence's next block will get once it is written, if its tokens are known."""
        return seq.keys[seq.num_published] if seq.can_publish and seq.num_published < len(seq.keys) else None

    def reset(self) -> bool:
        """Forget all cached prefixes. Running sequences go on, but nothing they have computed or will compute on top of
        it is hit by others. Returns whether the pool is empty now."""
        for seq in self._admitted:
            seq.can_publish = False
            seq.num_published = 0
        return self.pool.reset()

    def sequences(self) -> Iterable[SequenceBlocks]:
        """Those that hold blocks."""
        return self._admitted

    def stats(self) -> CacheStats:
        """Current figures."""
        pool = self.pool
        return CacheStats(
            num_blocks=pool.num_blocks - 1,
            num_free=pool.num_free,
            num_referenced=pool.num_referenced,
            num_cached=pool.num_cached,
            num_evicted=pool.num_evicted,
            query_tokens=self._query_tokens,
            hit_tokens=self._hit_tokens,
        )

    def check(self) -> None:
        """Assert every invariant of the pool and of all tables. Slow: for tests."""
        self.pool.check([seq.table for seq in self._admitted])
        for seq in self._admitted:
            named = [self.pool.key_of(block_id) for block_id in seq.table[: seq.num_published]]
            assert named == seq.keys[: seq.num_published], "a published block doesn't bear its name"
            assert seq.num_published * self.block_size <= seq.num_computed, "a block is named before it is written"
            assert seq.num_computed <= len(seq.table) * self.block_size, "tokens are computed beyond the table"

    def _publish(self, seq: SequenceBlocks, num_full: int) -> None:
        assert self.hasher is not None
        self.hasher.extend(seq.keys, seq.contents, seq.token_ids, seq.marks)
        for at in range(seq.num_published, num_full):
            block_id = seq.table[at]
            parent = seq.table[at - 1] if at else 0
            bearer = self.pool.publish(block_id, seq.keys[at], parent, seq.contents[at])
            if bearer is None:
                seq.can_publish = False
                return
            if bearer != block_id:
                self.pool.share((bearer,))
                self.pool.release((block_id,))
                seq.table[at] = bearer
            seq.num_published = at + 1

    def _hit(self, block_ids: Sequence[int]) -> Hit:
        num_tokens = len(block_ids) * self.block_size
        return Hit(block_ids, num_tokens, self.pool.count_free(block_ids), self.pool.generation)

    def _require_fresh(self, hit: Hit) -> None:
        if hit.block_ids and hit.generation != self.pool.generation:
            raise RuntimeError(
                "blocks were taken or forgotten since this hit was found, perhaps its own: find it again"
            )

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

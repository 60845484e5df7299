"""The pool of KV blocks: who holds them, what they are named, and which are given away next.

    blank free     no name, no reference    take: becomes referenced
    referenced     in 1 or more tables      publish: named as well. Last release: free, blank or cached
    cached free    name, no reference       share: referenced again. take, once no blank one is left: evicted

Blocks are integers; what belongs to a block stands in parallel lists. Every operation is O(1) a block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from mlserve.cache.eviction import FreeBlocks
from mlserve.cache.hashing import BlockKey
from mlserve.errors import ConfigError

__all__ = ["BlockPool"]


class BlockPool:
    """Blocks 1 to `num_blocks` - 1. Block 0 is never handed out: tables may be padded with it.

    A block's name is its key, its content, and its parent: the block before it in its table, 0 for a first block. A
    lookup goes by key and is confirmed by the other two, so a collision of keys costs a miss. The parent is a block and
    not a key, because keys that collide can't confirm each other. This holds along whole prefixes as long as callers
    look blocks up from the first on, stop at a miss, and publish a block only if its parent bears its name: a parent
    then keeps its name until all its children have lost theirs.

    Misuse raises `RuntimeError`: releasing a block more often than it was shared, or taking more than there is.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ConfigError(f"num_blocks is {num_blocks}: give at least 2, because block 0 is never handed out")
        self.num_blocks = num_blocks
        self.num_evicted = 0  # names given up for new content, since the start
        self.generation = 0  # differs once a block found earlier may hold something else, or may not be hit any more
        self._free = FreeBlocks(range(1, num_blocks))
        self._block_of: dict[BlockKey, int] = {}
        self._references = [0] * num_blocks
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._parents = [0] * num_blocks
        self._contents: list[bytes | None] = [None] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that `take` can hand out, cached ones included."""
        return len(self._free)

    @property
    def num_referenced(self) -> int:
        """Blocks in at least one table."""
        return self.num_blocks - 1 - len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks with a name, referenced or not."""
        return len(self._block_of)

    def can_take(self, count: int) -> bool:
        """Whether `take(count)` would succeed."""
        return count <= len(self._free)

    def take(self, count: int) -> list[int]:
        """Hand out blocks, evicting cached ones if need be. Each has one reference, no name, and arbitrary content."""
        if not 0 <= count <= len(self._free):
            raise RuntimeError(f"{count} blocks wanted, {len(self._free)} are free: ask can_take first")
        taken = self._free.pop_blank(count)
        while len(taken) < count:
            block_id = self._free.pop_named()
            self._forget(block_id)
            self.num_evicted += 1
            taken.append(block_id)
        for block_id in taken:
            self._references[block_id] = 1
        self.generation += bool(taken)
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to blocks that a lookup found or that another table holds."""
        references = self._references
        for block_id in block_ids:
            if not references[block_id]:
                self._free.remove_named(block_id)
            references[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop a reference to each block of a table. Those left without any become free, the table's end first."""
        references = self._references
        for block_id in reversed(block_ids):
            if references[block_id] < 1:
                raise RuntimeError(f"block {block_id} is released but has no reference: share or take it first")
            references[block_id] -= 1
            if not references[block_id]:
                if self._keys[block_id] is None:
                    self._free.add_blank(block_id)
                else:
                    self._free.add_named(block_id)

    def lookup(self, key: BlockKey, parent: int, content: bytes) -> int | None:
        """The block of that name, or None. Takes no reference and isn't a use."""
        block_id = self._block_of.get(key)
        if block_id is None or self._contents[block_id] != content or self._parents[block_id] != parent:
            return None
        return block_id

    def publish(self, block_id: int, key: BlockKey, parent: int, content: bytes) -> int | None:
        """Name a referenced block, whose KV is now written. Returns the block that bears the name.

        That is another block if the name is taken: the caller swaps to it and releases its own, so that equal names
        share one block. None if the key belongs to different content: the block stays without a name.
        """
        if key in self._block_of:
            return self.lookup(key, parent, content)
        self._block_of[key] = block_id
        self._keys[block_id] = key
        self._parents[block_id] = parent
        self._contents[block_id] = content
        return block_id

    def reset(self) -> bool:
        """Forget all names, those of referenced blocks too, so that nothing computed until now is ever hit again.

        Returns whether the pool is empty now: False if tables still hold blocks, which stay theirs until released.
        """
        for block_id in list(self._block_of.values()):
            self._forget(block_id)
        self._free.forget_names()
        self.generation += 1
        return self.num_referenced == 0

    def count_free(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks nobody references: sharing them makes `num_free` smaller by as much."""
        return list(map(self._references.__getitem__, block_ids)).count(0)

    def key_of(self, block_id: int) -> BlockKey | None:
        """The key that a block bears."""
        return self._keys[block_id]

    def uses(self) -> list[tuple[int, bytes | None]]:
        """For each block its references, and its content if it bears a name."""
        return list(zip(self._references, self._contents, strict=True))

    def free_ids(self) -> list[int]:
        """Free blocks in the exact order in which `take` hands them out."""
        return list(self._free)

    def _forget(self, block_id: int) -> None:
        key = self._keys[block_id]
        assert key is not None
        del self._block_of[key]
        self._keys[block_id] = self._contents[block_id] = None

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert every invariant, given all tables. Slow: for tests."""
        free = self.free_ids()
        referenced = {block_id for block_id, count in enumerate(self._references) if count}
        assert sorted([*free, *referenced]) == list(range(1, self.num_blocks)), "a block is lost, double or block 0"
        held = Counter(block_id for table in tables for block_id in table)
        assert held == Counter(dict(enumerate(self._references))), "a count isn't the number of tables with the block"
        bearers = {key: block_id for block_id, key in enumerate(self._keys) if key is not None}
        assert bearers == self._block_of, "the key table doesn't mirror the names"
        named_free = list(self._free.named)
        assert [block_id for block_id in free if self._keys[block_id] is not None] == named_free, "wrong queue"
        place = {block_id: at for at, block_id in enumerate(named_free)}
        for block_id in bearers.values():
            parent = self._parents[block_id]
            if parent:
                assert self._keys[parent] is not None, f"block {block_id} is cached, its parent {parent} isn't"
                assert self._references[parent] >= self._references[block_id], "a table lacks its block's parent"
                if parent in place:
                    assert place[block_id] < place[parent], "a block would be evicted before its children"

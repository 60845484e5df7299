"""Which free block is given away next.

Blocks without a name hold nothing that could be hit, so they go first. Among named ones three rules decide:

1. only a block that no sequence references,
2. the one that was used least recently; a sequence uses its blocks until it releases them,
3. among equals, which are blocks of one release, the one at the end of the longest prefix.

One queue keeps that order without a clock: a release appends its blocks from last to first, a hit takes a block out of
the middle, an eviction takes the head. Each is O(1). `docs/prefix-caching.md` shows that this is the order in which a
radix tree would evict its least recently used leaves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

__all__ = ["FreeBlocks"]


class FreeBlocks:
    """The blocks that no sequence references, in the order in which they are given away."""

    def __init__(self, blank: Iterable[int]) -> None:
        self._blank = list(blank)[::-1]  # a stack: what was freed last is still in the CPU's caches
        self._named: OrderedDict[int, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._blank) + len(self._named)

    def __iter__(self) -> Iterator[int]:
        yield from reversed(self._blank)
        yield from self._named

    @property
    def named(self) -> Iterable[int]:
        """Blocks that can be hit, in the order in which they would be evicted."""
        return self._named

    def pop_blank(self, limit: int) -> list[int]:
        """Give away up to `limit` blocks without a name."""
        start = max(len(self._blank) - limit, 0)
        taken = self._blank[start:]
        del self._blank[start:]
        taken.reverse()
        return taken

    def pop_named(self) -> int:
        """Evict the block that the three rules choose. Raises `KeyError` if there is none."""
        return self._named.popitem(last=False)[0]

    def add_blank(self, block_id: int) -> None:
        """A block without a name became free."""
        self._blank.append(block_id)

    def add_named(self, block_id: int) -> None:
        """A named block became free: it is now the most recently used. Call for a table's last block first."""
        self._named[block_id] = None

    def remove_named(self, block_id: int) -> None:
        """A free block was hit, and is in use again. Raises `KeyError` for a block that isn't free or has no name."""
        del self._named[block_id]

    def forget_names(self) -> None:
        """Make all blocks blank."""
        self._blank += reversed(self._named)
        self._named.clear()

"""Adapters in host memory by what they contain, in a bounded number of bytes.

A content is in use while it is leased, and kept while a name that has it is pinned. All others are free: they stay
until room is needed, and those whose last use ended first go first. A free content without a name is of no use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from mlserve.adapters.host import HostAdapter
from mlserve.adapters.spec import targets_text

__all__ = ["AdapterStore", "Content"]


@dataclass(slots=True, eq=False)
class Content:
    """An adapter that was read, and how many hold it. Counts are written by `AdapterStore` only."""

    adapter: HostAdapter | None  # None once it left the store
    digest: bytes
    rank: int
    num_bytes: int
    targets: str
    num_names: int = 0
    num_pins: int = 0  # names that are pinned
    num_leases: int = 0

    @classmethod
    def of(cls, adapter: HostAdapter) -> Content:
        """An adapter that was just read. Takes up to a millisecond: call it without a lock."""
        return cls(adapter, adapter.digest, adapter.rank, adapter.num_bytes, targets_text(adapter.targets))

    @property
    def is_free(self) -> bool:
        """Whether it may be evicted."""
        return not (self.num_leases or self.num_pins)


class AdapterStore:
    """Not for several threads at once. Everything is O(1), evictions as often as contents were put."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0  # of all contents
        self.pinned_bytes = 0
        self._contents: dict[bytes, Content] = {}
        self._free: OrderedDict[bytes, Content] = OrderedDict()  # evicted from the head
        self._free_bytes = 0

    def __iter__(self) -> Iterator[Content]:
        yield from self._contents.values()

    def free_digests(self) -> list[bytes]:
        """In the order in which they would be evicted."""
        return list(self._free)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._contents

    def can_fit(self, content: Content, unpinned: Content | None = None) -> bool:
        """Whether `put` would find room, after one pin of the content `unpinned` is taken off."""
        taken = self.num_bytes - self._free_bytes
        if unpinned is not None and unpinned.num_pins == 1 and not unpinned.num_leases:
            taken -= unpinned.num_bytes
        return content.digest in self or taken + content.num_bytes <= self.max_bytes

    def put(self, content: Content) -> Content:
        """Keep a content that was just read, unless there is an equal one; returns which, now the last to be evicted.

        Evicts what it must. Raises `RuntimeError` where `can_fit` is false.
        """
        known = self._contents.get(content.digest)
        if known is not None:
            if known.is_free:
                self._free.move_to_end(known.digest)
            return known
        if not self.can_fit(content):
            raise RuntimeError("the store has no room: ask can_fit first")
        while self.num_bytes + content.num_bytes > self.max_bytes:
            self._remove(next(iter(self._free.values())))
        self._contents[content.digest] = self._free[content.digest] = content
        self.num_bytes += content.num_bytes
        self._free_bytes += content.num_bytes
        return content

    def acquire(self, content: Content, num_leases: int) -> None:
        """Count leases of a content that is in the store."""
        content.num_leases += num_leases
        self._settle(content)

    def release(self, content: Content) -> None:
        """One lease less."""
        content.num_leases -= 1
        self._settle(content)

    def add_name(self, content: Content, is_pinned: bool) -> None:
        """A name has this content, which is in the store."""
        content.num_names += 1
        if is_pinned:
            content.num_pins += 1
            self.pinned_bytes += content.num_bytes if content.num_pins == 1 else 0
        self._settle(content)

    def remove_name(self, content: Content, is_pinned: bool) -> None:
        """A name, which was pinned or not, has this content no longer. It may have been evicted before."""
        content.num_names -= 1
        if is_pinned:
            content.num_pins -= 1
            self.pinned_bytes -= 0 if content.num_pins else content.num_bytes
        self._settle(content)

    def check(self) -> None:
        """Assert what must always be true between operations of the registry."""
        contents = list(self)
        assert all(
            content.adapter is not None and content.digest == digest for digest, content in self._contents.items()
        )
        assert self.num_bytes == sum(content.num_bytes for content in contents) <= self.max_bytes
        assert self.pinned_bytes == sum(content.num_bytes for content in contents if content.num_pins)
        assert set(self._free) == {content.digest for content in contents if content.is_free}
        assert self._free_bytes == sum(content.num_bytes for content in self._free.values())
        assert all(content.num_names >= content.num_pins >= 0 <= content.num_leases for content in contents)
        assert all(content.num_names or content.num_leases for content in contents)

    def _settle(self, content: Content) -> None:
        """Put a content whose counts have changed where it belongs."""
        if content.adapter is None:
            return
        if not content.is_free:
            self._take_from_free(content)
        elif not content.num_names:
            self._remove(content)
        elif content.digest not in self._free:
            self._free[content.digest] = content
            self._free_bytes += content.num_bytes

    def _take_from_free(self, content: Content) -> None:
        if self._free.pop(content.digest, None) is not None:
            self._free_bytes -= content.num_bytes

    def _remove(self, content: Content) -> None:
        self._take_from_free(content)
        del self._contents[content.digest]
        self.num_bytes -= content.num_bytes
        content.adapter = None

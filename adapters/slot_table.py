"""Which adapter is in which slot of the device.

A slot that nobody uses keeps its content until it is needed for another: first those go that hold nothing, then the one
that was used least recently. One queue of free slots has that order: a release appends, and a slot whose content was
lost goes to the head.
"""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["SlotTable"]


class SlotTable:
    """Slots `0 .. num_slots - 1` and their users. It only keeps books: whoever takes a slot writes it. All is O(1)."""

    def __init__(self, num_slots: int) -> None:
        self._digests: list[bytes | None] = [None] * num_slots
        self._num_users = [0] * num_slots
        self._slots: dict[bytes, int] = {}  # the other way round
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_slots))  # the first is given away next
        self._lost: set[bytes] = set()  # in use, but to be written again
        self.num_writes = 0  # slots that were taken to be written, since the start

    def can_take(self, digest: bytes) -> bool:
        """Whether the adapter has a slot, or there is one that nobody uses."""
        return digest in self._slots or bool(self._free)

    def is_resident(self, digest: bytes) -> bool:
        """Whether a slot has the adapter's content."""
        return digest in self._slots and digest not in self._lost

    def soonest_free(self) -> bytes:
        """The adapter with the fewest users, of those with any: its slot is likely to be free first. O(slots).

        Raises `RuntimeError` if no slot is in use.
        """
        used = {digest: self._num_users[slot] for digest, slot in self._slots.items() if self._num_users[slot]}
        if not used:
            raise RuntimeError("no slot is in use: take one first")
        return min(used, key=used.__getitem__)

    def take(self, digest: bytes) -> tuple[int, bool]:
        """Count one user more: the adapter's slot, and whether the caller must write its content first.

        It is the slot that the adapter has, else one that holds nothing (of those never used the lowest), else the one
        that was released first. Raises `RuntimeError` where `can_take` is false.
        """
        if not self.can_take(digest):
            raise RuntimeError(f"all {len(self._digests)} slots are in use: ask can_take first")
        slot = self._slots.get(digest)
        must_write = slot is None or digest in self._lost
        self._lost.discard(digest)
        if slot is None:
            slot, _ = self._free.popitem(last=False)
            self._assign(slot, digest)
        elif not self._num_users[slot]:
            del self._free[slot]
        self._num_users[slot] += 1
        self.num_writes += must_write
        return slot, must_write

    def release(self, digest: bytes) -> None:
        """One user less; the content stays until the slot is needed. Raises `RuntimeError` if there is no user."""
        slot = self._slots.get(digest)
        if slot is None or not self._num_users[slot]:
            raise RuntimeError("the adapter's slot is released more often than it was taken")
        self._num_users[slot] -= 1
        if not self._num_users[slot]:
            self._free[slot] = None
            if digest in self._lost:
                self._clear(slot, digest)

    def forget(self, digest: bytes) -> None:
        """The content must be written again, by the next who takes it. Users keep the slot."""
        slot = self._slots.get(digest)
        if slot is None:
            return
        if self._num_users[slot]:
            self._lost.add(digest)
        else:
            self._clear(slot, digest)

    def check(self) -> None:
        """Assert what must always be true."""
        assert self._slots == {digest: slot for slot, digest in enumerate(self._digests) if digest is not None}
        assert set(self._free) == {slot for slot, count in enumerate(self._num_users) if count == 0}
        assert min(self._num_users, default=0) >= 0
        assert all(self._num_users[self._slots[digest]] for digest in self._lost)
        holds_something = [self._digests[slot] is not None for slot in self._free]
        assert holds_something == sorted(holds_something), "slots that hold nothing are given away first"

    def _assign(self, slot: int, digest: bytes) -> None:
        previous = self._digests[slot]
        if previous is not None:
            del self._slots[previous]
        self._digests[slot] = digest
        self._slots[digest] = slot

    def _clear(self, slot: int, digest: bytes) -> None:
        """Make a free slot one that holds nothing."""
        self._lost.discard(digest)
        del self._slots[digest]
        self._digests[slot] = None
        self._free.move_to_end(slot, last=False)

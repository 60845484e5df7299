from __future__ import annotations

import random

import pytest
from tree import run_python

from mlserve.adapters.slot_table import SlotTable

A, B, C, D = b"a", b"b", b"c", b"d"


def test_new_slots_are_taken_from_the_lowest() -> None:
    table = SlotTable(3)
    assert [table.take(digest) for digest in (A, B, C)] == [(0, True), (1, True), (2, True)]
    assert not table.can_take(D)
    with pytest.raises(RuntimeError, match="all 3 slots are in use"):
        table.take(D)
    table.check()


def test_users_of_one_adapter_share_its_slot() -> None:
    table = SlotTable(1)
    assert table.take(A) == (0, True)
    assert table.take(A) == (0, False)
    table.release(A)
    assert not table.can_take(B)
    table.release(A)
    assert table.can_take(B)
    assert table.is_resident(A)
    assert table.take(A) == (0, False)


def test_a_new_slot_goes_before_one_with_content() -> None:
    table = SlotTable(2)
    table.take(A)
    table.release(A)
    assert table.take(B) == (1, True)
    assert table.is_resident(A)


def test_the_least_recently_used_is_replaced() -> None:
    table = SlotTable(3)
    for digest in (A, B, C):
        table.take(digest)
    for digest in (B, A, C):
        table.release(digest)
    table.take(B)
    table.release(B)  # now it was used last
    assert table.take(D) == (0, True)
    assert [table.is_resident(digest) for digest in (A, B, C, D)] == [False, True, True, True]
    assert table.take(A) == (2, True)
    table.check()


def test_forgotten_content_is_written_again() -> None:
    table = SlotTable(2)
    table.take(A)
    table.forget(A)
    assert not table.is_resident(A)
    assert table.can_take(A)
    assert table.take(A) == (0, True)
    assert table.take(A) == (0, False)
    table.forget(D)  # has no slot
    table.check()


def test_a_slot_whose_content_is_lost_is_replaced_first() -> None:
    table = SlotTable(2)
    for digest in (A, B):
        table.take(digest)
    table.forget(B)
    table.release(A)
    table.release(B)
    assert table.take(C) == (1, True)
    table.forget(A)
    assert table.take(D) == (0, True)
    table.check()


def test_releases_are_counted() -> None:
    table = SlotTable(1)
    with pytest.raises(RuntimeError, match="more often"):
        table.release(A)
    table.take(A)
    table.release(A)
    with pytest.raises(RuntimeError, match="more often"):
        table.release(A)


def test_no_torch_is_needed() -> None:
    done = run_python("import sys, mlserve.adapters.slot_table; print('torch' in sys.modules)")
    assert done.stdout.strip() == "False"


class SlowTable:
    """The rules, spelled out over a list of slots."""

    def __init__(self, num_slots: int) -> None:
        self.slots = [{"digest": b"", "users": 0, "written": False, "freed": i - num_slots} for i in range(num_slots)]
        self.clock = 0

    def slot_of(self, digest: bytes) -> int | None:
        return next((i for i, slot in enumerate(self.slots) if slot["digest"] == digest), None)

    def can_take(self, digest: bytes) -> bool:
        return self.slot_of(digest) is not None or any(slot["users"] == 0 for slot in self.slots)

    def take(self, digest: bytes) -> tuple[int, bool]:
        index = self.slot_of(digest)
        if index is None:
            free = [i for i, slot in enumerate(self.slots) if slot["users"] == 0]
            index = min(free, key=lambda i: self.slots[i]["freed"])
            self.slots[index] |= {"digest": digest, "written": False}
        slot = self.slots[index]
        must_write = not slot["written"]
        slot |= {"users": slot["users"] + 1, "written": True}
        return index, must_write

    def release(self, digest: bytes) -> None:
        slot = self.slots[self.slot_of(digest)]
        self.clock += 1
        slot |= {"users": slot["users"] - 1, "freed": self.clock}
        self.blank(slot)

    def forget(self, digest: bytes) -> None:
        if (index := self.slot_of(digest)) is not None:
            self.slots[index]["written"] = False
            self.blank(self.slots[index])

    def blank(self, slot: dict) -> None:
        """Nobody finds anything in a free slot that isn't written: it goes before all others."""
        if not slot["users"] and not slot["written"]:
            slot |= {"digest": b"", "freed": min(other["freed"] for other in self.slots) - 1}


@pytest.mark.parametrize("seed", range(40))
def test_it_does_what_the_rules_say(seed: int) -> None:
    rng = random.Random(seed)
    num_slots = rng.randint(1, 5)
    table, slow, users = SlotTable(num_slots), SlowTable(num_slots), []
    digests = [bytes([i]) for i in range(1, 8)]
    for _ in range(300):
        digest = rng.choice(digests)
        assert table.can_take(digest) == slow.can_take(digest)
        action = rng.choice(["take", "take", "release", "release", "forget"])
        if action == "take" and slow.can_take(digest):
            assert table.take(digest) == slow.take(digest)
            users.append(digest)
        elif action == "release" and users:
            digest = users.pop(rng.randrange(len(users)))
            table.release(digest)
            slow.release(digest)
        elif action == "forget":
            table.forget(digest)
            slow.forget(digest)
        table.check()
        for digest in digests:
            index = slow.slot_of(digest)
            assert table.is_resident(digest) == (index is not None and slow.slots[index]["written"])


def test_the_adapter_with_the_fewest_users_is_likely_to_be_free_first() -> None:
    table = SlotTable(3)
    with pytest.raises(RuntimeError, match="no slot is in use"):
        table.soonest_free()
    for digest in (b"a", b"a", b"b", b"b", b"b", b"c"):
        table.take(digest)
    assert table.soonest_free() == b"c"
    table.release(b"c")
    assert table.soonest_free() == b"a"
    for digest in (b"a", b"a"):
        table.take(digest)
    assert table.soonest_free() == b"b"

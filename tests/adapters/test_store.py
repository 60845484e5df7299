from __future__ import annotations

import random

import pytest
from host_adapters import small_adapter

from mlserve.adapters.store import AdapterStore, Content


def content(name: str, num_bytes: int = 8) -> Content:
    return Content.of(small_adapter(name, num_bytes))


def named(store: AdapterStore, name: str, num_bytes: int = 8, *, is_pinned: bool = False) -> Content:
    """A content with a name, put into the store."""
    kept = store.put(content(name, num_bytes))
    store.add_name(kept, is_pinned)
    store.check()
    return kept


def free(store: AdapterStore) -> str:
    return b"".join(store.free_digests()).decode()


def test_what_is_known_of_a_content() -> None:
    adapter = small_adapter("a", 80)
    found = Content.of(adapter)
    assert found.adapter is adapter
    assert (found.digest, found.rank, found.num_bytes, found.targets) == (b"a", 1, 80, "q_proj (layer 0)")


def test_the_least_recently_used_is_evicted_first() -> None:
    store = AdapterStore(32)
    a, b, c, d = (named(store, name) for name in "abcd")
    assert free(store) == "abcd"
    store.acquire(b, 1)
    store.acquire(a, 2)
    store.release(b)
    store.release(a)
    assert free(store) == "cdb"
    store.release(a)
    assert free(store) == "cdba"
    assert store.put(content("c")) is c
    assert free(store) == "dbac"
    named(store, "e", 16)
    assert free(store) == "ace"
    assert (b.adapter, d.adapter) == (None, None)
    assert store.num_bytes == 32
    store.check()


def test_what_is_leased_or_pinned_stays() -> None:
    store = AdapterStore(24)
    a, b = named(store, "a"), named(store, "b", is_pinned=True)
    named(store, "c")
    store.acquire(a, 1)
    assert free(store) == "c"
    assert store.pinned_bytes == 8
    assert store.can_fit(content("d"))
    assert not store.can_fit(content("d", 16))
    with pytest.raises(RuntimeError, match="no room"):
        store.put(content("d", 16))
    assert {kept.digest for kept in store} == {b"a", b"b", b"c"}  # nothing was evicted in vain
    store.add_name(b, False)
    store.remove_name(b, True)
    assert free(store) == "cb"
    assert store.pinned_bytes == 0


def test_equal_contents_are_one_and_need_no_room() -> None:
    store = AdapterStore(8)
    a = named(store, "a")
    store.acquire(a, 1)
    assert store.can_fit(content("a"))
    assert named(store, "a") is a
    assert (a.num_names, store.num_bytes) == (2, 8)


def test_a_content_without_a_name_leaves_when_it_is_free() -> None:
    store = AdapterStore(16)
    a = named(store, "a")
    store.acquire(a, 1)
    store.remove_name(a, False)
    assert a.adapter is not None
    store.check()
    store.release(a)
    assert a.adapter is None
    assert store.num_bytes == 0
    store.check()


def test_room_that_taking_off_a_pin_would_make() -> None:
    store = AdapterStore(16)
    a = named(store, "a", 16, is_pinned=True)
    assert not store.can_fit(content("b", 16))
    assert store.can_fit(content("b", 16), unpinned=a)
    store.acquire(a, 1)
    assert not store.can_fit(content("b", 16), unpinned=a)
    store.release(a)
    store.add_name(a, True)
    assert not store.can_fit(content("b", 16), unpinned=a)  # the other name pins it


@pytest.mark.parametrize("seed", range(40))
def test_it_does_what_the_rules_say(seed: int) -> None:
    """Against a plain list of free contents, and sums over it."""
    rng = random.Random(seed)
    sizes = {name: 8 * rng.randint(1, 4) for name in "abcdefgh"}
    store = AdapterStore(8 * rng.randint(4, 12))
    order: list[str] = []  # of what was used last
    names: list[tuple[str, bool]] = []
    leases: list[str] = []
    kept: dict[str, Content] = {}

    def is_held(name: str) -> bool:
        return name in leases or (name, True) in names

    for _ in range(200):
        name, action = rng.choice("abcdefgh"), rng.randrange(5)
        if action == 0:
            held = sum(sizes[other] for other in kept if is_held(other))
            fits = name in kept or held + sizes[name] <= store.max_bytes
            assert store.can_fit(content(name, sizes[name])) == fits
            if not fits:
                continue
            while name not in kept and sum(map(sizes.__getitem__, kept)) + sizes[name] > store.max_bytes:
                gone = next(other for other in order if not is_held(other))
                order.remove(gone)
                assert kept.pop(gone).adapter is not None
                names = [item for item in names if item[0] != gone]
            kept[name] = store.put(content(name, sizes[name]))
            is_pinned = rng.random() < 0.2
            store.add_name(kept[name], is_pinned)
            names.append((name, is_pinned))
            order = [*(other for other in order if other != name), name]
        elif action == 1 and name in kept:
            store.acquire(kept[name], 1)
            leases.append(name)
        elif action in (2, 3) and leases:
            name = leases.pop(rng.randrange(len(leases)))
            store.release(kept[name])
            if not is_held(name):
                order = [*(other for other in order if other != name), name]
        elif action == 4 and names:
            name, is_pinned = names.pop(rng.randrange(len(names)))
            was_held = is_held(name) or is_pinned
            store.remove_name(kept[name], is_pinned)
            if was_held and not is_held(name):
                order = [*(other for other in order if other != name), name]
        for name in [name for name in kept if not is_held(name) and name not in dict(names)]:
            assert kept.pop(name).adapter is None
            order.remove(name)
        store.check()
        assert {found.digest.decode() for found in store} == kept.keys()
        assert free(store) == "".join(name for name in order if not is_held(name))

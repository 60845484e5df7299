"""What the registry does in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing

import pytest
from host_adapters import FakeFiles, arrived, error_of, evicted_next, info, loaded, use

from mlserve.adapters.registry import AdapterRegistry
from mlserve.errors import (
    AdapterError,
    AdapterFileNotFoundError,
    AdapterLimitError,
    AdapterNotFoundError,
    CorruptAdapterError,
)

Make = Callable[..., AdapterRegistry]


def test_a_background_load_waits_for_room(make: Make, files: FakeFiles) -> None:
    registry = make(max_bytes=8)
    for name in "abc":
        registry.register(name, name)
    a, b, c = (registry.lease(name) for name in "abc")
    arrived(registry, a)
    for _ in range(2):
        assert files.has_begun.acquire(timeout=20)
    registry.wait(0.01)
    assert (b.poll(), c.poll()) == (None, None)
    a.close()
    assert arrived(registry, b).digest == b"b"
    b.close()
    assert arrived(registry, c).digest == b"c"
    assert files.reads == ["a", "b", "c"]


def test_a_background_load_does_not_wait_for_what_is_pinned(make: Make) -> None:
    registry = make(max_bytes=8)
    registry.load("a", "a", pinned=True)
    registry.register("b", "b")
    with closing(registry.lease("b")) as lease:
        assert isinstance(error_of(registry, lease), AdapterLimitError)


def test_a_load_without_room_that_nobody_waits_for_ends(make: Make, files: FakeFiles) -> None:
    """The next in the queue gets its turn: here one that needs no room."""
    registry = make(max_bytes=8)
    for name, path in (("a", "a"), ("b", "b"), ("same", "a")):
        registry.register(name, path)
    a, b = registry.lease("a"), registry.lease("b")
    arrived(registry, a)
    for _ in range(2):
        assert files.has_begun.acquire(timeout=20)
    b.close()
    same = registry.lease("same")
    assert arrived(registry, same) is a.poll()
    assert not info(registry, "b").is_loaded


def test_waiting_for_room_is_not_in_the_way_of_those_in_memory(make: Make, files: FakeFiles) -> None:
    registry = make(max_bytes=16)
    for name in "abc":
        registry.register(name, name)
    a, b, c = (registry.lease(name) for name in "abc")
    arrived(registry, b)
    for _ in range(3):
        assert files.has_begun.acquire(timeout=20)
    assert c.poll() is None
    assert use(registry, "a").digest == b"a"
    registry.unload("b")
    b.close()
    assert arrived(registry, c).digest == b"c"
    a.close()


def test_many_leases_of_one_name_cause_one_read(make: Make, files: FakeFiles) -> None:
    registry = make()
    registry.register("a", "a")
    files.may_end.clear()
    leases = [registry.lease("a") for _ in range(10)]
    assert [lease.poll() for lease in leases] == [None] * 10
    assert info(registry, "a").num_leases == 10
    files.may_end.set()
    assert len({id(arrived(registry, lease)) for lease in leases}) == 1
    assert files.reads == ["a"]
    for lease in leases:
        lease.close()
    assert evicted_next(registry) == "a"


def test_loads_run_in_the_order_of_arrival_and_leave_no_thread(make: Make, files: FakeFiles) -> None:
    registry = make(max_bytes=48)
    names = "cafbed"
    files.may_end.clear()
    leases = []
    for name in names:
        registry.register(name, name)
        leases.append(registry.lease(name))
    thread = registry._worker.thread
    assert thread is not None
    assert thread.daemon
    files.may_end.set()
    arrived(registry, leases[-1])
    assert "".join(files.reads) == names
    thread.join(20)
    assert registry._worker.thread is None


@pytest.mark.parametrize(
    "error", [CorruptAdapterError("bad"), AdapterFileNotFoundError("none"), OSError("disk"), MemoryError("small")]
)
def test_a_background_load_that_fails(make: Make, files: FakeFiles, error: Exception) -> None:
    registry = make()
    registry.register("a", "a")
    registry.register("b", "b")
    good, files.contents["a"] = files.contents["a"], error
    files.may_end.clear()
    leases = [registry.lease("a"), registry.lease("a")]
    behind = registry.lease("b")
    files.may_end.set()
    failures = [error_of(registry, lease) for lease in leases * 2]
    assert {str(failure) for failure in failures} == {str(failures[0])}
    assert str(error) in str(failures[0])
    assert isinstance(failures[0], type(error) if isinstance(error, AdapterError) else AdapterError)
    assert arrived(registry, behind).digest == b"b"  # the thread lives on
    for lease in leases:
        lease.close()
    assert (loaded(registry), info(registry, "a").num_leases) == ("b", 0)
    files.contents["a"] = good
    assert use(registry, "a").digest == b"a"
    assert files.reads == ["a", "b", "a"]


def test_a_failure_holds_on_to_nothing(make: Make, files: FakeFiles) -> None:
    registry = make()
    registry.register("a", "a")
    files.contents["a"] = OSError("disk")
    with closing(registry.lease("a")) as lease:
        error_of(registry, lease)
        outcome = lease.load.outcome
    assert isinstance(outcome, AdapterError)
    assert outcome.__traceback__ is outcome.__cause__ is outcome.__context__ is None


def test_a_lease_that_nobody_waits_for_is_not_read(make: Make, files: FakeFiles) -> None:
    registry = make()
    for name in "abc":
        registry.register(name, name)
    files.may_end.clear()
    a, b, c = (registry.lease(name) for name in "abc")
    b.close()
    files.may_end.set()
    arrived(registry, c)
    arrived(registry, a)
    assert files.reads == ["a", "c"]
    assert use(registry, "b").digest == b"b"


def test_unload_while_it_loads(make: Make, files: FakeFiles) -> None:
    registry = make()
    registry.register("a", "a")
    files.may_end.clear()
    lease = registry.lease("a")
    registry.unload("a")
    with pytest.raises(AdapterNotFoundError):
        registry.lease("a")
    files.may_end.set()
    assert arrived(registry, lease).digest == b"a"
    assert registry.list() == []
    lease.close()
    assert registry._store.num_bytes == 0


def test_load_while_it_loads(make: Make, files: FakeFiles) -> None:
    """Who waits gets what is there first; what is read of the old files then is dropped."""
    registry = make()
    registry.register("a", "a")
    files.slow = {"a"}
    files.may_end.clear()
    lease = registry.lease("a")
    assert files.has_begun.acquire(timeout=20)
    thread = registry._worker.thread
    assert registry.load("a", "b").digest == b"b"
    adapter = lease.poll()
    assert adapter is not None
    assert adapter.digest == b"b"
    files.may_end.set()
    assert thread is not None
    thread.join(20)
    assert use(registry, "a").digest == b"b"
    assert {content.digest for content in registry._store} == {b"b"}
    lease.close()
    assert files.reads == ["a", "b"]


def test_unload_while_a_load_that_nobody_waits_for_is_under_way(make: Make, files: FakeFiles) -> None:
    registry = make(max_bytes=8)
    registry.load("b", "b")
    files.has_begun.acquire()
    registry.register("a", "a")
    files.may_end.clear()
    lease = registry.lease("a")
    assert files.has_begun.acquire(timeout=20)
    lease.close()
    registry.unload("a")
    thread = registry._worker.thread
    files.may_end.set()
    assert thread is not None
    thread.join(20)
    assert loaded(registry) == "b"  # not evicted in vain


def test_a_load_that_nobody_waits_for_any_more_is_kept(make: Make, files: FakeFiles) -> None:
    registry = make()
    registry.register("a", "a")
    files.may_end.clear()
    lease = registry.lease("a")
    assert files.has_begun.acquire(timeout=20)
    lease.close()
    files.may_end.set()
    assert use(registry, "a").digest == b"a"
    assert files.reads == ["a"]


def test_close_ends_what_waits(make: Make, files: FakeFiles) -> None:
    registry = make()
    registry.load("c", "c")
    for name in "ab":
        registry.register(name, name)
    files.may_end.clear()
    leases = [registry.lease(name) for name in "ab"]
    threading.Timer(0.05, files.may_end.set).start()
    registry.close()
    assert registry._worker.thread is None
    leases.append(registry.lease("a"))
    for lease in leases:
        with pytest.raises(AdapterError, match="the engine was closed"):
            lease.poll()
        lease.close()
    assert files.reads == ["c", "a"]
    assert use(registry, "c").digest == b"c"
    registry.close()


def test_close_ends_a_wait_for_room(make: Make, files: FakeFiles) -> None:
    registry = make(max_bytes=8)
    registry.load("a", "a")
    registry.register("b", "b")
    a, b = registry.lease("a"), registry.lease("b")
    for _ in range(2):
        assert files.has_begun.acquire(timeout=20)
    registry.close()
    with pytest.raises(AdapterError, match="the engine was closed"):
        b.poll()
    assert a.poll() is not None


def test_wait_misses_nothing(make: Make) -> None:
    registry = make()
    registry.load("a", "a")
    lease = registry.lease("a")
    registry.wait(0)
    lease.close()
    start = time.monotonic()
    registry.wait(20)  # a lease was closed since the last wait
    assert time.monotonic() - start < 10
    registry.wait(0.01)  # nothing happened

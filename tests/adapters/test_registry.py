"""What the registry does in the caller's thread."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from host_adapters import FakeFiles, arrived, error_of, evicted_next, info, loaded, small_adapter, use

from mlserve.adapters.registry import AdapterInfo, AdapterRegistry
from mlserve.errors import (
    AdapterError,
    AdapterFileNotFoundError,
    AdapterLimitError,
    CorruptAdapterError,
)

Make = Callable[..., AdapterRegistry]


def test_a_registered_name_is_read_on_first_use(make: Make, files: FakeFiles) -> None:
    registry = make()
    registry.register("fr", "/some/where/a")
    assert files.reads == []
    path = Path("/some/where/a")
    assert registry.list() == [AdapterInfo("fr", path, None, None, None, None, False, False, 0)]
    lease = registry.lease("fr")
    assert arrived(registry, lease) is files.contents["a"]
    assert lease.poll() is files.contents["a"]
    assert registry.list() == [AdapterInfo("fr", path, b"a", 1, "q_proj (layer 0)", 8, True, False, 1)]
    lease.close()
    lease.close()
    assert info(registry, "fr").num_leases == 0
    assert use(registry, "fr") is files.contents["a"]
    assert files.reads == ["a"]


def test_load_reads_at_once(make: Make, files: FakeFiles) -> None:
    registry = make()
    assert registry.load("a", "x/a") == AdapterInfo(
        "a", Path.cwd() / "x/a", b"a", 1, "q_proj (layer 0)", 8, True, False, 0
    )
    assert registry._worker.thread is None
    with closing(registry.lease("a")) as lease:
        assert lease.poll() is files.contents["a"]


def test_names_of_equal_content_share_it(make: Make) -> None:
    registry = make(max_bytes=8)
    registry.load("one", "a")
    registry.load("two", "a")
    assert registry._store.num_bytes == 8
    registry.unload("one")
    assert registry._store.num_bytes == 8
    with closing(registry.lease("two")) as lease:
        assert lease.poll() is not None
    registry.unload("two")
    assert registry._store.num_bytes == 0
    assert registry.list() == []


def test_2_01_reload(make: Make, files: FakeFiles) -> None:
    """The name of a report: files are replaced, and the same name is loaded again."""
    registry = make()
    registry.load("a", "a")
    old = registry.lease("a")
    files.contents["a"] = small_adapter("new")
    assert registry.load("a").digest == b"new"
    new = registry.lease("a")
    assert [arrived(registry, lease).digest for lease in (old, new)] == [b"a", b"new"]
    assert registry._store.num_bytes == 16
    assert info(registry, "a").num_leases == 2
    old.close()
    assert registry._store.num_bytes == 8  # nobody can ask for the old content any more
    files.contents["a"] = small_adapter("newer")
    registry.unload("a")
    registry.load("a", "a")
    assert use(registry, "a").digest == b"newer"
    new_again = new.poll()
    assert new_again is not None
    assert new_again.digest == b"new"
    new.close()
    assert registry._store.num_bytes == 8


def test_reload_of_equal_files_keeps_the_content(make: Make, files: FakeFiles) -> None:
    registry = make(max_bytes=8)
    registry.load("a", "a", pinned=True)
    first = use(registry, "a")
    files.contents["a"] = small_adapter("a")
    assert registry.load("a").is_pinned is False
    assert use(registry, "a") is first
    assert registry.load("a", pinned=True).is_pinned


@pytest.mark.parametrize(
    "error", [CorruptAdapterError("bad"), AdapterFileNotFoundError("none"), OSError("disk"), MemoryError("small")]
)
def test_2_12_a_failed_load_changes_nothing(make: Make, files: FakeFiles, error: Exception) -> None:
    registry = make()
    registry.load("a", "a", pinned=True)
    before = registry.list()
    files.contents["a"] = files.contents["b"] = error
    kind = type(error) if isinstance(error, AdapterError) else AdapterError
    for name, path in (("b", "b"), ("a", None), ("a", "b")):
        with pytest.raises(kind, match=str(error)) as raised:
            registry.load(name, path)
        assert type(raised.value) is kind
        assert registry.list() == before
    assert use(registry, "a").digest == b"a"


def test_the_least_recently_used_is_evicted_first(make: Make, files: FakeFiles) -> None:
    registry = make()
    for name in "abcdef":
        registry.register(name, name)
    for name in "abc":
        use(registry, name)
    lease = registry.lease("a")
    use(registry, "b")
    assert (loaded(registry), evicted_next(registry)) == ("abc", "cb")
    registry.load("d")
    assert (loaded(registry), evicted_next(registry)) == ("abd", "bd")
    lease.close()
    assert evicted_next(registry) == "bda"
    use(registry, "e")
    use(registry, "c")
    assert (loaded(registry), evicted_next(registry)) == ("ace", "aec")
    assert info(registry, "b") == AdapterInfo("b", Path.cwd() / "b", b"b", 1, "q_proj (layer 0)", 8, False, False, 0)
    assert files.reads == ["a", "b", "c", "d", "e", "c"]


def test_evicted_content_is_read_again_as_the_files_are_then(make: Make, files: FakeFiles) -> None:
    registry = make(max_bytes=8)
    for name in "ab":
        registry.register(name, name)
        use(registry, name)
    files.contents["a"] = small_adapter("new")
    assert use(registry, "a").digest == b"new"
    assert info(registry, "a").digest == b"new"


def test_pinned_content_stays(make: Make) -> None:
    registry = make(max_bytes=16)
    registry.load("a", "a", pinned=True)
    for name in "bcd":
        registry.load(name, name)
    assert loaded(registry) == "ad"
    assert info(registry, "a").is_pinned
    registry.load("a")
    registry.load("e", "e")
    registry.load("f", "f")
    assert loaded(registry) == "ef"


def test_an_adapter_larger_than_the_memory(make: Make, files: FakeFiles) -> None:
    registry = make(max_bytes=16)
    files.contents["a"] = small_adapter("a", 24)
    registry.load("b", "b")
    want = "adapter 'a' takes 24 bytes of memory, limit 16: raise max_adapter_memory"
    with pytest.raises(AdapterLimitError, match=want):
        registry.load("a", "a")
    registry.register("a", "a")
    with closing(registry.lease("a")) as lease:
        assert str(error_of(registry, lease)) == want
    assert loaded(registry) == "b"  # it wasn't evicted in vain


def test_load_without_room(make: Make) -> None:
    registry = make(max_bytes=16)
    registry.load("a", "a", pinned=True)
    registry.load("b", "b")
    lease = registry.lease("b")
    with pytest.raises(AdapterLimitError, match=r"'c' takes 8 bytes.* of the 16 .* in use: raise max_adapter"):
        registry.load("c", "c")
    with pytest.raises(AdapterLimitError, match="'b' takes 8 bytes"):
        registry.load("b", "c")  # the lease keeps the old content
    assert info(registry, "b").path == Path.cwd() / "b"
    assert registry.load("a", "c", pinned=True).digest == b"c"  # in the place of what the name had pinned
    lease.close()
    assert registry.load("d", "d").digest == b"d"


def test_load_without_a_path_reads_where_the_name_was_read_last(make: Make, files: FakeFiles) -> None:
    registry = make()
    registry.register("x", "a")
    assert registry.load("x").digest == b"a"
    assert registry.load("x", "b").digest == b"b"
    assert registry.load("x").path == Path.cwd() / "b"
    assert files.reads == ["a", "b", "b"]


def test_a_pin_of_another_name_holds(make: Make) -> None:
    registry = make(max_bytes=8)
    registry.load("a", "a", pinned=True)
    registry.load("same", "a")
    with pytest.raises(AdapterLimitError, match="'same' takes 8 bytes"):
        registry.load("same", "b")
    assert loaded(registry) == "asame"


def test_a_closed_lease_cannot_be_asked(make: Make) -> None:
    registry = make()
    registry.load("a", "a")
    lease = registry.lease("a")
    lease.close()
    with pytest.raises(RuntimeError, match="lease is closed"):
        lease.poll()


def test_register_replaces_what_the_name_had(make: Make) -> None:
    registry = make()
    registry.load("a", "a", pinned=True)
    registry.register("a", "b")
    assert (loaded(registry), registry._store.num_bytes, info(registry, "a").is_pinned) == ("", 0, False)
    assert use(registry, "a").digest == b"b"

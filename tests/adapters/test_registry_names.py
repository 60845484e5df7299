"""Names that the registry takes, and those that it finds in a directory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from host_adapters import FakeFiles, error_of, small_adapter, use

from mlserve.adapters.host import HostAdapter
from mlserve.adapters.registry import AdapterRegistry
from mlserve.errors import (
    AdapterNotFoundError,
    ConfigError,
    CorruptAdapterError,
)

Make = Callable[..., AdapterRegistry]


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 257, "\ud800", None])
def test_names_that_cannot_be(make: Make, files: FakeFiles, name: Any) -> None:
    registry = make()
    for action in (registry.register, registry.load):
        with pytest.raises(ConfigError, match="an adapter can't have the name"):
            action(name, "a")
    assert registry.list() == []
    assert files.reads == []
    registry.load("x" * 256, "a")


def test_unknown_names(make: Make) -> None:
    registry = make()
    for action in (registry.lease, registry.load, registry.unload, registry.require):
        with pytest.raises(AdapterNotFoundError, match="no adapter has the name 'french', and there are no others"):
            action("french")
    for name in ("french-v1", "french-v2", "pirate", "json"):
        registry.register(name, "a")
    with pytest.raises(AdapterNotFoundError, match=r"'french': use 'french-v[12]' or 'french-v[12]', or load"):
        registry.lease("french")
    with pytest.raises(AdapterNotFoundError, match=r"use another \(french-v1, french-v2, json and 1 more\), or"):
        registry.require("z")
    with pytest.raises(AdapterNotFoundError) as raised:
        registry.lease("z" * 10_000)
    assert len(str(raised.value)) < 400
    registry.require("json")


def test_an_unknown_name_is_compared_with_its_neighbours(make: Make) -> None:
    registry = make()
    for i in range(1000):
        registry.register(f"adapter-{i:04}", "a")
    with pytest.raises(AdapterNotFoundError, match="use 'adapter-0777' or 'adapter-"):
        registry.lease("adapter-0777x")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name in ("a", "b", ".hidden"):
        (tmp_path / "adapters" / name).mkdir(parents=True)
    (tmp_path / "adapters/file").touch()
    (tmp_path / "outside").mkdir()
    return tmp_path / "adapters"


def test_directory(make: Make, files: FakeFiles, directory: Path) -> None:
    registry = make(directory=directory)
    assert registry.list() == []
    assert use(registry, "a").digest == b"a"
    registry.require("b")
    assert [found.name for found in registry.list()] == ["a"]
    assert registry.load("b").path == directory / "b"
    assert registry.load("b").digest == b"b"
    registry.unload("b")
    assert use(registry, "b").digest == b"b"
    (directory / "c").mkdir()
    assert use(registry, "c").digest == b"c"
    with pytest.raises(AdapterNotFoundError, match="use another"):
        registry.lease("zzz")


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "../outside", "a/../b", "a\\b", "a\0", "file", "x" * 256, "é" * 200, "a\n"]
)
def test_only_plain_names_are_looked_for_in_the_directory(make: Make, directory: Path, name: str) -> None:
    registry = make(directory=directory)
    with pytest.raises(AdapterNotFoundError):
        registry.lease(name)
    assert registry.list() == []


def test_names_of_the_directory_are_suggested(make: Make, directory: Path) -> None:
    (directory / "pirates").mkdir()  # what has no config is no adapter
    (directory / "pirate").mkdir()
    (directory / "pirate" / "adapter_config.json").touch()
    with pytest.raises(AdapterNotFoundError, match="use 'pirate', or load it"):
        make(directory=directory).lease("pirat")


def test_a_folder_that_is_no_adapter_is_not_listed(make: Make, files: FakeFiles, directory: Path) -> None:
    registry = make(directory=directory)
    good, files.contents["a"] = files.contents["a"], CorruptAdapterError("bad")
    with closing(registry.lease("a")) as lease:
        error_of(registry, lease)
    assert registry.list() == []
    files.contents["a"] = good
    assert use(registry, "a").digest == b"a"
    registry.load("b")
    registry.load("c", "c")
    registry.load("d", "d")  # evicts a, which stays listed whatever becomes of its files
    files.contents["a"] = CorruptAdapterError("bad")
    with closing(registry.lease("a")) as lease:
        error_of(registry, lease)
    assert [found.name for found in registry.list()] == ["a", "b", "c", "d"]


def test_the_root_is_the_directory_and_none_for_other_paths(make: Make, directory: Path) -> None:
    roots = {}

    def reader(path: Path, base: Any, limits: Any, weights: Any, root: Path | None) -> HostAdapter:
        roots[path] = root
        return small_adapter(path.name)

    registry = make(directory=directory, reader=reader)
    use(registry, "a")
    registry.load("b")
    registry.load("c", directory / "c")
    assert roots == {directory / "a": directory, directory / "b": directory, directory / "c": None}

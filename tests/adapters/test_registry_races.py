"""The registry under random operations and several threads, and with the files of real adapters."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from adapter_files import WEIGHTS, changed_copy
from host_adapters import FakeFiles, arrived, info, small_adapter, use
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_adapters import write_adapter

from mlserve.adapters.host import read_host_adapter
from mlserve.adapters.peft_format import read_adapter
from mlserve.adapters.registry import AdapterLease, AdapterRegistry
from mlserve.adapters.spec import AdapterLimits, BaseShape
from mlserve.errors import AdapterError, AdapterLimitError, AdapterNotFoundError, CorruptAdapterError

Make = Callable[..., AdapterRegistry]

NAMES = "abcd"
STEPS = st.tuples(
    st.sampled_from(["register", "load", "pin", "unload", "lease", "lease", "close", "change", "break"]),
    st.sampled_from(NAMES),
    st.sampled_from([8, 16, 24]),
)


class _World:
    """A registry, and what must be true of it."""

    def __init__(self, shape: BaseShape) -> None:
        self.files = FakeFiles(**{name: small_adapter(f"{name}0") for name in NAMES})
        self.registry = AdapterRegistry(shape, Any, AdapterLimits(), max_bytes=40, reader=self.files)
        self.leases: list[tuple[AdapterLease, str]] = []
        self.delivered: dict[AdapterLease, bytes] = {}
        self.changes = 0

    def do(self, step: str, name: str, size: int) -> None:
        match step:
            case "register":
                self.registry.register(name, name)
            case "load" | "pin":
                with suppress(AdapterError):
                    found = self.registry.load(name, name, pinned=step == "pin")
                    content = self.files.contents[name]
                    assert found.digest == getattr(content, "digest", None)
            case "unload":
                with suppress(AdapterNotFoundError):
                    self.registry.unload(name)
            case "lease":
                with suppress(AdapterNotFoundError):
                    lease = self.registry.lease(name)
                    if info(self.registry, name).is_loaded:
                        assert self.look(lease) == info(self.registry, name).digest
                    self.leases.append((lease, name))
            case "close" if self.leases:
                self.leases.pop(size % len(self.leases))[0].close()
            case "change":
                self.changes += 1
                self.files.contents[name] = small_adapter(f"{name}{self.changes}", size)
            case "break":
                self.files.contents[name] = CorruptAdapterError("broken")
        self.check()

    def look(self, lease: AdapterLease) -> bytes | None:
        """What a lease delivers, always the same."""
        try:
            adapter = lease.poll()
        except AdapterError:
            assert lease not in self.delivered
            return None
        if adapter is None:
            assert lease not in self.delivered
            return None
        assert self.delivered.setdefault(lease, adapter.digest) == adapter.digest
        return adapter.digest

    def check(self) -> None:
        for lease, name in self.leases:
            digest = self.look(lease)
            assert digest is None or digest.decode().startswith(name)
        with self.registry._changed:
            self.registry._store.check()
            leased = {lease.poll().digest for lease in self.delivered if not lease.is_closed}
            assert leased <= {content.digest for content in self.registry._store}

    def end(self) -> None:
        for lease, _ in self.leases:
            lease.close()
        for found in self.registry.list():
            assert found.num_leases == 0
            self.registry.unload(found.name)
        self.registry.close()
        assert self.registry._store.num_bytes == 0
        self.registry._store.check()


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, max_size=60))
def test_bytes_are_counted_and_leases_keep_their_content(shape: BaseShape, steps: list[tuple[str, str, int]]) -> None:
    world = _World(shape)
    for step in steps:
        world.do(*step)
    world.end()


@pytest.mark.parametrize("seed", range(3))
def test_leases_while_names_are_unloaded_and_reloaded(make: Make, files: FakeFiles, seed: int) -> None:
    """Two threads lease one name, a third takes it away, changes its files and loads it again."""
    registry = make(max_bytes=64)
    wrong: list[str] = []
    is_over = threading.Event()

    def lease() -> None:
        rng = random.Random(seed)
        while not is_over.is_set():
            try:
                held = registry.lease("a")
            except AdapterNotFoundError:
                continue
            with closing(held):
                first = arrived(registry, held)
                for _ in range(rng.randrange(5)):
                    if held.poll() is not first:
                        wrong.append("the content changed")

    threads = [threading.Thread(target=lease) for _ in range(2)]
    for thread in threads:
        thread.start()
    for version in range(100):
        files.contents["a"] = small_adapter(f"a{version}", 16)
        if version % 3 == 0:
            registry.register("a", "a")
        else:
            assert registry.load("a", "a").digest == f"a{version}".encode()
        with registry._changed:
            registry._store.check()
        if version % 2:
            registry.unload("a")
    is_over.set()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert wrong == []
    with suppress(AdapterNotFoundError):
        registry.unload("a")
    assert registry._store.num_bytes == 0


def test_threads_that_ask_for_more_than_fits(make: Make, files: FakeFiles) -> None:
    """Each holds one adapter at a time, so all get theirs."""
    registry = make(max_bytes=16)
    for name in "abcdef":
        registry.register(name, name)
    wrong: list[str] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(30):
            name = rng.choice("abcdef")
            if use(registry, name).digest != name.encode():
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert wrong == []


def test_2_12_bad_adapters_are_not_listed(
    make: Make, tiny_model_dir: Path, plain: Path, tmp_path: Path, shape: BaseShape
) -> None:
    registry = AdapterRegistry(shape, Any, AdapterLimits(max_rank=16), max_bytes=2**20, directory=tmp_path)
    write_adapter(tmp_path / "large", tiny_model_dir, 1, r=64)
    (changed_copy(plain, tmp_path / "empty") / WEIGHTS).unlink()
    for name in ("large", "empty"):
        with pytest.raises(AdapterError, match=rf"the adapter in '\S+/{name}' can't be loaded"):
            registry.load(name, tmp_path / name)
        with closing(registry.lease(name)) as lease, pytest.raises(AdapterError, match="can't be loaded"):
            arrived(registry, lease)
    with pytest.raises(AdapterError, match="there is no such folder"):
        registry.load("none", tmp_path / "none")
    assert registry.list() == []
    write_adapter(tmp_path / "good", tiny_model_dir, 1, r=16)
    assert registry.load("good").rank == 16
    registry.close()


def test_2_01_files_are_replaced(tiny_model_dir: Path, plain: Path, tmp_path: Path, shape: BaseShape) -> None:
    registry = AdapterRegistry(shape, Any, AdapterLimits(), max_bytes=2**20)
    folder = shutil.copytree(plain, tmp_path / "a")
    first = registry.load("a", folder)
    other = write_adapter(tmp_path / "other", tiny_model_dir, 2)
    shutil.copytree(other, folder, dirs_exist_ok=True)
    assert registry.load("a").digest == read_adapter(other, shape, AdapterLimits()).digest != first.digest
    assert use(registry, "a").digest == registry.list()[0].digest
    registry.close()


def test_links_do_not_lead_out_of_the_directory(plain: Path, tmp_path: Path, shape: BaseShape) -> None:
    directory = tmp_path / "adapters"
    directory.mkdir()
    (directory / "a").symlink_to(plain)
    registry = AdapterRegistry(shape, Any, AdapterLimits(), max_bytes=2**20, directory=directory)
    with pytest.raises(CorruptAdapterError, match="lies outside"):
        registry.load("a")
    assert registry.load("a", directory / "a").digest is not None  # whoever gives a path vouches for it
    registry.close()


def test_the_memory_of_an_adapter_is_its_tensors(plain: Path, shape: BaseShape) -> None:
    num_bytes = read_host_adapter(plain, shape, AdapterLimits(), Any, None).num_bytes
    assert num_bytes == 2 * 4 * 4 * (128 + 96 + 96 + 128)
    for limit, fits in ((num_bytes, True), (num_bytes - 1, False)):
        registry = AdapterRegistry(shape, Any, AdapterLimits(), max_bytes=limit)
        if fits:
            assert registry.load("a", plain).num_bytes == num_bytes
        else:
            with pytest.raises(AdapterLimitError, match=f"takes {num_bytes} bytes of memory, limit {limit}"):
                registry.load("a", plain)
        registry.close()

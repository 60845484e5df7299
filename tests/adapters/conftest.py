from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from host_adapters import FakeFiles, small_adapter
from tiny_adapters import base_shape, write_adapter
from torch import Tensor

from mlserve.adapters.registry import AdapterRegistry
from mlserve.adapters.safetensors_file import SafetensorsFile
from mlserve.adapters.spec import AdapterLimits, BaseShape


@pytest.fixture(scope="session")
def shape(tiny_model_dir: Path) -> BaseShape:
    """The shape of TINY."""
    return base_shape(tiny_model_dir)


@pytest.fixture(scope="session")
def plain(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """AD(1) of TINY."""
    return write_adapter(tmp_path_factory.mktemp("plain"), tiny_model_dir, 1)


@pytest.fixture(scope="session")
def dora(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """AD(1) of TINY with DoRA."""
    return write_adapter(tmp_path_factory.mktemp("dora"), tiny_model_dir, 1, use_dora=True)


@pytest.fixture
def no_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters must be refused by what their headers say."""

    def read(self: SafetensorsFile, name: str) -> Tensor:
        raise AssertionError(f"{name} is read")

    monkeypatch.setattr(SafetensorsFile, "read", read)


@pytest.fixture
def limits() -> AdapterLimits:
    return AdapterLimits()


@pytest.fixture
def files() -> FakeFiles:
    """Folders a to f with an adapter of 8 bytes each."""
    return FakeFiles(**{name: small_adapter(name) for name in "abcdef"})


@pytest.fixture
def make(files: FakeFiles, shape: BaseShape, limits: AdapterLimits) -> Iterator[Callable[..., AdapterRegistry]]:
    """Makes registries that read `files`, with room for three of them; all are closed at the end."""
    made = []

    def registry(max_bytes: int = 24, **options: Any) -> AdapterRegistry:
        made.append(AdapterRegistry(shape, NoWeights(), limits, max_bytes=max_bytes, **{"reader": files} | options))
        return made[-1]

    yield registry
    files.may_end.set()
    for one in made:
        one.close()
        one._store.check()


class NoWeights:
    def equals(self, *_: Any) -> bool:
        raise AssertionError

    weight = bias = equals

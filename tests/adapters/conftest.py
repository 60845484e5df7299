from __future__ import annotations

from pathlib import Path

import pytest
from tiny_adapters import base_shape, write_adapter
from torch import Tensor

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

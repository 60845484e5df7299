"""The implementations under test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mlserve.kernels.cpu.ops import CpuOps
from mlserve.kernels.reference import ReferenceOps


@pytest.fixture(scope="session")
def native() -> CpuOps:
    return CpuOps()


@pytest.fixture(scope="session")
def reference() -> ReferenceOps:
    return ReferenceOps()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def _two_threads() -> Iterator[None]:
    """Two threads even where tests run on one. Few tests take it: where the cores are busy, each operation waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)

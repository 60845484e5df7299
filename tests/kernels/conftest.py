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
def _two_threads_and_a_seed() -> Iterator[None]:
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)

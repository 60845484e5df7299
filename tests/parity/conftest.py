from __future__ import annotations

import pytest
import torch

from mlserve.errors import ConfigError, KernelBuildError
from mlserve.kernels.dispatch import select


@pytest.fixture(params=["reference", "cpu"])
def kernels(request: pytest.FixtureRequest) -> str:
    """Name of an implementation of the operations; native ones are skipped where they can't be built."""
    name: str = request.param
    try:
        select(torch.device("cpu"), name)
    except (ConfigError, KernelBuildError) as error:
        pytest.skip(str(error))
    return name

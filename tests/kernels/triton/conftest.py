"""Where the Triton kernels run: on the GPU if there is one, else in Triton's interpreter on CPU tensors."""

from __future__ import annotations

import pytest
import torch
import triton_interpreter

if not torch.cuda.is_available():
    triton_interpreter.install()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")

"""What both kinds of weights files look like to their reader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["DTYPES", "TensorFile", "TensorInfo"]

# In which adapters are served, by their names in safetensors.
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a file says of one tensor."""

    shape: tuple[int, ...]
    dtype: str  # a name of `DTYPES`, or that of another dtype
    num_bytes: int


class TensorFile(Protocol):
    """Tensors in an open file: what there is of them is known before any is read."""

    @property
    def infos(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str) -> Tensor:
        """A contiguous tensor with memory of its own, in the file's dtype, which must be one of `DTYPES`."""
        ...

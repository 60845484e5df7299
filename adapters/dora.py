"""DoRA, weight-decomposed low-rank adaptation (Liu et al. 2024, https://arxiv.org/abs/2402.09353), as in PEFT."""

from __future__ import annotations

import torch
from torch import Tensor

from mlserve.adapters.spec import LoraWeights
from mlserve.errors import CorruptAdapterError

__all__ = ["row_scales"]

_ROWS = 4096  # at once: 64 MiB of float32 for 4096 columns


def row_scales(lora: LoraWeights, weight: Tensor) -> Tensor:
    """What DoRA multiplies the rows of W + scaling * b @ a with: magnitude / norm of the row, `[out]` float32.

    `weight: [out, in]` is the base model's W in any dtype, for an embedding the transpose of its table. The module's
    output is then row_scales * (W x + scaling * b (a x)) + bias. Raises `CorruptAdapterError` if a row has no length.
    """
    assert lora.magnitude is not None
    a, b = lora.a.float(), lora.b.float()
    norms = []
    for start in range(0, weight.shape[0], _ROWS):
        rows = slice(start, start + _ROWS)
        norms.append(torch.linalg.vector_norm(weight[rows].float() + lora.scaling * (b[rows] @ a), dim=1))
    scales = lora.magnitude.float() / torch.cat(norms)
    if not torch.isfinite(scales).all():
        raise CorruptAdapterError("a row of a weight with DoRA has the norm 0: train the adapter again")
    return scales

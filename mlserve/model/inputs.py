"""One step's input as tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mlserve.kernels import PagedBatch

__all__ = ["ForwardBatch"]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """All tokens of one step, prefill and decode mixed, sequences one after the other. An argument, never a global."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    paged: PagedBatch
    logit_rows: Tensor  # [R] int64: rows of [0, T) whose logits are wanted

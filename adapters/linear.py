"""LoRA in the decoder: what a step's adapters add to the output of each linear."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mlserve.adapters.segments import AdapterRows
from mlserve.adapters.slots import AdapterSlots, Projection
from mlserve.kernels import AdapterSegments, Ops

__all__ = ["StepAdapters"]


class StepAdapters:
    """The adapters of one step, over all its rows or a selection of them. Rows of the base model cost nothing."""

    def __init__(self, slots: AdapterSlots, ops: Ops, rows: AdapterRows) -> None:
        """`rows`: not empty."""
        self._slots = slots
        self._ops = ops
        self._rows = rows
        self._segments: AdapterSegments = rows.segments(slots.device)
        self._used = set(self._segments.slots.tolist())
        self._active = slots.projections(self._used)
        self._dora_rows: dict[Projection, tuple[Tensor, Tensor]] = {}

    def select(self, chosen: Sequence[int]) -> StepAdapters | None:
        """The same for the matrix whose row i is row chosen[i] of this one; None if no adapter acts on it."""
        rows = self._rows.select(chosen)
        return StepAdapters(self._slots, self._ops, rows) if len(rows.rows) else None

    def changes(self, projection: Projection) -> bool:
        """Whether any adapter of the step acts on that linear."""
        return projection in self._active

    def apply(self, projection: Projection, layer: int, x: Tensor, y: Tensor) -> None:
        """`x: [T, in]`, `y: [T, out]` = the base model's linear of x; becomes the adapters' in place.

        LoRA: y + scaling * B(A x). DoRA: row_scales * (y - bias + scaling * B(A x)) + bias, as PEFT computes them.
        """
        if projection not in self._active:
            return
        lora = self._slots.lora(projection, layer)
        shrunk = self._ops.lora_shrink(x, lora, self._segments)  # [N, slices, R]
        self._rescale(projection, layer, y)
        self._ops.lora_expand_(shrunk, lora, self._segments, y)

    def embed(self, token_ids: Tensor, y: Tensor) -> None:
        """`token_ids: [T]`, `y: [T, H]` = their rows of the embedding table; becomes the adapters' in place."""
        if Projection.EMBED not in self._active:
            return
        lora = self._slots.lora(Projection.EMBED, 0)
        order, lengths = self._segments.order, self._segments.starts.diff()
        row_slots = self._segments.slots.long().repeat_interleave(lengths)
        shrunk = lora.a[row_slots, :, :, token_ids[order]].float()  # [N, 1, R]: columns of A in place of A @ one-hot
        self._rescale(Projection.EMBED, 0, y)
        self._ops.lora_expand_(shrunk, lora, self._segments, y)

    def _rescale(self, projection: Projection, layer: int, y: Tensor) -> None:
        scales = self._slots.row_scales(projection, layer)
        if scales is None or not self._slots.dora_slots(projection) & self._used:
            return
        rows, slots = self._rows_with_dora(projection)
        y[rows] = (y[rows] * scales.scale[slots] + scales.shift[slots]).to(y.dtype)

    def _rows_with_dora(self, projection: Projection) -> tuple[Tensor, Tensor]:
        """Rows `[M]` whose slot has DoRA on the projection, and their slots: the same for all layers."""
        if projection not in self._dora_rows:
            with_dora = self._slots.dora_slots(projection)
            at = [i for i, slot in enumerate(self._rows.slots.tolist()) if slot in with_dora]
            rows, slots = torch.from_numpy(self._rows.rows[at]), torch.from_numpy(self._rows.slots[at]).long()
            device = self._slots.device
            self._dora_rows[projection] = (rows.to(device), slots.to(device))
        return self._dora_rows[projection]

"""LoRA in the decoder: what a step's adapters add to the output of each linear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mlserve.adapters.segments import AdapterRows, GroupedRows
from mlserve.adapters.slots import AdapterSlots, Projection
from mlserve.kernels import Activation, AdapterSegments, Linear, Ops

__all__ = ["Put", "StepAdapters"]

Put = Callable[[NDArray[Any]], Tensor]  # brings an array to the device; its numbers may arrive later


class StepAdapters:
    """The adapters of one step, over all its rows or a selection of them. Rows of the base model cost nothing.

    What is decided here is decided on the host: nothing is asked of the device.
    """

    def __init__(
        self,
        slots: AdapterSlots,
        ops: Ops,
        rows: AdapterRows,
        put: Put | None = None,
        *,
        padded_rows: int | None = None,
    ) -> None:
        """`rows`: not empty. `put`: by default each array is copied on its own.

        With `padded_rows` shapes and calls depend on that number and on `AdapterSlots.layout` alone, so that a graph
        captured for one step serves others: segments for all slots, and all linears that any slot could change. Only
        for adapters without DoRA, whose rows are picked by index.
        """
        put = slots.put if put is None else put
        self._slots, self._ops, self._rows = slots, ops, rows
        grouped = rows.grouped()
        used = frozenset(grouped.slots.tolist())
        if padded_rows is None:
            self._active = slots.projections(used)
        else:
            self._active = slots.layout
            grouped = grouped.padded(padded_rows, slots.num_slots)
        slots.before_use(used)
        self._segments = AdapterSegments(put(grouped.order), put(grouped.starts), put(grouped.slots))
        self._row_slots = put(grouped.row_slots) if Projection.EMBED in self._active else None  # [N]
        self._with_dora = frozenset(p for p in self._active if slots.dora_slots(p) & used)
        self._dora_rows = _rows_of(grouped, slots.with_dora(used), put) if self._with_dora else None

    def select(self, chosen: Sequence[int] | NDArray[np.int64], put: Put | None = None) -> StepAdapters | None:
        """The same for the matrix whose row i is row chosen[i] of this one; None if no adapter acts on it."""
        rows = self._rows.select(chosen)
        return StepAdapters(self._slots, self._ops, rows, put) if len(rows.rows) else None

    def changes(self, projection: Projection) -> bool:
        """Whether any adapter of the step acts on that linear."""
        return projection in self._active

    def linear(
        self, projection: Projection, layer: int, x: Tensor, weight: Linear, activation: Activation | None = None
    ) -> Tensor:
        """`Ops.linear` of that projection with the adapters' part: `x: [T, in] -> [T, out]`, or `[T, out / 2]`.

        LoRA: y + scaling * B(A x). DoRA: row_scales * (y - bias + scaling * B(A x)) + bias, as PEFT computes them.
        """
        ops = self._ops
        if projection not in self._active:
            return ops.linear(x, weight, activation=activation)
        adapters = self._slots.lora(projection, layer), self._segments
        if projection not in self._with_dora:
            return ops.linear(x, weight, adapters, activation)
        y = ops.linear(x, weight)
        self._rescale(projection, layer, y)
        ops.lora_expand_(ops.lora_shrink(x, *adapters), *adapters, y)
        return y if activation is None else ops.gated_activation(y, activation)

    def embed(self, token_ids: Tensor, y: Tensor) -> None:
        """`token_ids: [T]`, `y: [T, H]` = their rows of the embedding table; becomes the adapters' in place."""
        if self._row_slots is None:
            return
        lora = self._slots.lora(Projection.EMBED, 0)
        ids = token_ids[self._segments.order]
        shrunk = lora.a[self._row_slots, :, :, ids].float()  # [N, 1, R]: columns of A in place of A @ one-hot
        self._rescale(Projection.EMBED, 0, y)
        self._ops.lora_expand_(shrunk, lora, self._segments, y)

    def _rescale(self, projection: Projection, layer: int, y: Tensor) -> None:
        """The rows of all slots that have DoRA on some linear: where one hasn't, its scales are 1 and its shifts 0."""
        if projection not in self._with_dora:
            return
        assert self._dora_rows is not None
        scales = self._slots.row_scales(projection, layer)
        rows, slots = self._dora_rows
        y[rows] = (y[rows] * scales.scale[slots] + scales.shift[slots]).to(y.dtype)


def _rows_of(grouped: GroupedRows, slots: frozenset[int], put: Put) -> tuple[Tensor, Tensor]:
    """Rows `[M]` of these slots, and their slots."""
    (at,) = np.nonzero(np.isin(grouped.row_slots, list(slots)))
    return put(grouped.order[at]), put(grouped.row_slots[at])

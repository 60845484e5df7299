"""Which rows of a step belong to which adapter slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from mlserve.kernels import AdapterSegments

__all__ = ["AdapterRows", "SlotRange"]


@dataclass(frozen=True, slots=True)
class SlotRange:
    """Rows [start, end) of a step, which one slot acts on."""

    slot: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class AdapterRows:
    """The rows of a step that an adapter acts on, ascending, and the slot of each; none of the base model's."""

    rows: NDArray[np.int64]  # [N]
    slots: NDArray[np.int32]  # [N]

    @classmethod
    def of_ranges(cls, ranges: Sequence[SlotRange]) -> AdapterRows:
        """From ranges in the order of their rows."""
        lengths = [piece.end - piece.start for piece in ranges]
        slots = np.repeat(np.array([piece.slot for piece in ranges], dtype=np.int32), lengths)
        if len(slots) == len(ranges):  # decoding: one row each
            return cls(np.array([piece.start for piece in ranges], dtype=np.int64), slots)
        rows = np.concatenate([np.arange(piece.start, piece.end, dtype=np.int64) for piece in ranges])
        return cls(rows, slots)

    def select(self, chosen: Sequence[int]) -> AdapterRows:
        """The same for the matrix whose row i is row chosen[i] of this one."""
        wanted = np.asarray(chosen, dtype=np.int64)
        at = np.minimum(np.searchsorted(self.rows, wanted), len(self.rows) - 1)
        (found,) = np.nonzero(self.rows[at] == wanted)
        return AdapterRows(found, self.slots[at[found]])

    def segments(self, device: torch.device) -> AdapterSegments:
        """Grouped by slot, for the kernels. There must be rows."""
        order = np.argsort(self.slots, kind="stable")
        slots, starts = np.unique(self.slots[order], return_index=True)
        starts = np.append(starts, len(order)).astype(np.int32)
        tensors = (torch.from_numpy(array).to(device, non_blocking=True) for array in (self.rows[order], starts, slots))
        return AdapterSegments(*tensors)

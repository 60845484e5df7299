"""Which rows of a step belong to which adapter slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["AdapterRows", "GroupedRows", "SlotRange"]


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

    def select(self, chosen: Sequence[int] | NDArray[np.int64]) -> AdapterRows:
        """The same for the matrix whose row i is row chosen[i] of this one."""
        wanted = np.asarray(chosen, dtype=np.int64)
        at = np.minimum(np.searchsorted(self.rows, wanted), len(self.rows) - 1)
        (found,) = np.nonzero(self.rows[at] == wanted)
        return AdapterRows(found, self.slots[at[found]])

    def grouped(self) -> GroupedRows:
        """The same by slot, for the kernels."""
        order = np.argsort(self.slots, kind="stable")
        row_slots = self.slots[order]
        slots, firsts = np.unique(row_slots, return_index=True)
        starts = np.append(firsts, len(order)).astype(np.int32)
        return GroupedRows(self.rows[order], starts, slots, row_slots.astype(np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class GroupedRows:
    """What `AdapterSegments` holds, in host memory."""

    order: NDArray[np.int64]  # [N]: rows of the step, ascending within a segment
    starts: NDArray[np.int32]  # [G + 1]
    slots: NDArray[np.int32]  # [G]: ascending
    row_slots: NDArray[np.int64]  # [N]: the slot of each row of `order`

    def padded(self, num_rows: int, num_segments: int) -> GroupedRows:
        """The same in a shape that doesn't depend on the step: row 0 in no segment at the end, then empty segments."""
        rows, segments = num_rows - len(self.order), num_segments - len(self.slots)
        return GroupedRows(
            np.pad(self.order, (0, rows)),
            np.pad(self.starts, (0, segments), mode="edge"),
            np.pad(self.slots, (0, segments)),
            np.pad(self.row_slots, (0, rows)),
        )

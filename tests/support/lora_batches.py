"""Batches of rows over adapters, as kernels see them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mlserve.kernels import AdapterSegments, LoraSlots

MIXES = ("one", "distinct", "zipf", "skewed", "none")


def adapters_of_rows(mix: str, rows: int, num_slots: int) -> list[int | None]:
    """The adapter slot of each row of a step, in random order; None: the base model's.

    one: all rows have the same. distinct: as many as there are slots. zipf: slot s is 1 / (s + 1) as frequent as slot
    0, and a fifth of the rows has none. skewed: one row of each slot, all others are slot 0's. none: no row has one.
    """
    slots: list[int | None]
    match mix:
        case "one":
            return [num_slots - 1] * rows
        case "distinct":
            slots = [row % num_slots for row in range(rows)]
        case "zipf":
            weights = 1 / torch.arange(1, num_slots + 1)
            drawn = torch.multinomial(weights, rows, replacement=True).tolist()
            slots = [None if row % 5 == 4 else slot for row, slot in enumerate(drawn)]
        case "skewed":
            slots = [row if row < num_slots else 0 for row in range(rows)]
        case "none":
            return [None] * rows
        case _:
            raise ValueError(f"mix {mix!r}: use one of {', '.join(MIXES)}")
    return [slots[i] for i in torch.randperm(rows).tolist()]


def segments_of(slots: Sequence[int | None]) -> AdapterSegments:
    """The segments of rows with these slots; segments stand in random order."""
    used = sorted({slot for slot in slots if slot is not None})
    used = [used[i] for i in torch.randperm(len(used)).tolist()]
    rows = [[row for row, own in enumerate(slots) if own == slot] for slot in used]
    return AdapterSegments(
        order=torch.tensor([row for segment in rows for row in segment], dtype=torch.int64),
        starts=torch.tensor([0, *map(len, rows)]).cumsum(0).int(),
        slots=torch.tensor(used, dtype=torch.int32),
    )


def lora_slots(
    ranks: Sequence[Sequence[int]], max_rank: int, size: int, out: Sequence[int], dtype: torch.dtype, layers: int = 3
) -> LoraSlots:
    """One layer of a stack of `layers`, in slots of `ranks[slot][k]`, inputs of `size` and slices of `out` columns.

    All else in the stack is NaN: other layers, and what lies beyond a rank.
    """
    num_slots, num_slices = len(ranks), len(out)
    starts = torch.tensor([0, *out]).cumsum(0).tolist()
    a = torch.full((num_slots, max_rank, layers, num_slices, size), torch.nan, dtype=dtype)
    a = a[:, :, layers // 2].transpose(1, 2)
    b = torch.full((num_slots, max_rank, layers, sum(out)), torch.nan, dtype=dtype)[:, :, layers // 2]
    for slot, slices in enumerate(ranks):
        for k, rank in enumerate(slices):
            a[slot, k, :rank] = (torch.randn(rank, size) * size**-0.5).to(dtype)
            b[slot, :rank, starts[k] : starts[k + 1]] = (torch.randn(rank, out[k]) * max(rank, 1) ** -0.5).to(dtype)
    return LoraSlots(a, b, torch.tensor(ranks, dtype=torch.int32), tuple(starts))


def within_ranks(shrunk: Tensor, lora: LoraSlots, segments: AdapterSegments) -> Tensor:
    """`shrunk: [N, K, R]` with zeros in place of what is undefined."""
    slots = segments.slots.long().repeat_interleave(segments.starts.diff().long())
    used = torch.arange(shrunk.shape[2], device=shrunk.device) < lora.ranks[slots][:, :, None]
    return torch.where(used, shrunk, 0.0)

"""Batched LoRA: shrink and expand of every fused linear, by batch and by number of adapters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
from gpu.cases import Case, Rig, Spec
from lora_batches import adapters_of_rows, lora_slots, segments_of, within_ranks
from tolerances import TRITON
from torch import Tensor

from mlserve.kernels import AdapterSegments, LoraSlots
from mlserve.kernels.reference import ReferenceOps
from mlserve.kernels.triton.lora_expand import lora_expand_
from mlserve.kernels.triton.lora_shrink import lora_shrink

__all__ = ["lora_specs"]

REFERENCE = ReferenceOps()
Build = Callable[[], Case]


def lora_specs(rig: Rig) -> Iterator[Spec]:
    """Of each linear every batch over the third number of adapters, and of the widest every number over the largest."""
    scale = rig.scale
    slots = cache(partial(_slots, rig))  # a linear's are shared by its cases
    most = max(scale.batches)
    shapes = [(name, rows, scale.adapters[-2]) for name in scale.shape.linears for rows in scale.batches]
    shapes += [(name, scale.prefill_rows, 1) for name in scale.shape.linears]
    shapes += [("gate_up", most, count) for count in scale.adapters if count != scale.adapters[-2]]
    for name, rows, wanted in shapes:
        count = min(rows, wanted)
        label = f"{name}, {rows} rows, {count} adapter{'s' * (count > 1)}"
        yield Spec("lora_shrink", label, partial(_shrink, rig, slots, name, rows, count))
        yield Spec("lora_expand", label, partial(_expand, rig, slots, name, rows, count))


def _slots(rig: Rig, name: str) -> LoraSlots:
    scale = rig.scale
    size, out = scale.shape.linears[name]
    ranks = [[scale.rank] * len(out)] * scale.num_slots
    lora = lora_slots(ranks, scale.rank, size, out, rig.dtype, layers=1)
    return dataclasses.replace(lora, a=lora.a.to(rig.device), b=lora.b.to(rig.device), ranks=lora.ranks.to(rig.device))


def _segments(rig: Rig, rows: int, count: int) -> AdapterSegments:
    """Decoding rows in random order, as requests come."""
    found = segments_of(adapters_of_rows("distinct", rows, count))
    return AdapterSegments(found.order.to(rig.device), found.starts.to(rig.device), found.slots.to(rig.device))


def _shrink(rig: Rig, slots: Callable[[str], LoraSlots], name: str, rows: int, count: int) -> Case:
    size, out = rig.scale.shape.linears[name]
    lora, segments, x = slots(name), _segments(rig, rows, count), rig.randn(rows, size)
    return Case(
        run=partial(lora_shrink, x, lora, segments),
        expected=lambda: within_ranks(REFERENCE.lora_shrink(x, lora, segments), lora, segments),
        view=lambda shrunk: within_ranks(shrunk, lora, segments),
        cost=rig.scale.shape.lora_shrink(rows, count, len(out), size, rig.scale.rank),
        tolerance=TRITON[torch.float32],
        peers={"torch": partial(_torch_shrink, x, lora, _rows_of(segments))},
    )


def _expand(rig: Rig, slots: Callable[[str], LoraSlots], name: str, rows: int, count: int) -> Case:
    _, out = rig.scale.shape.linears[name]
    lora, segments = slots(name), _segments(rig, rows, count)
    start = rig.randn(rows, sum(out))
    y = start.clone()
    shrunk = torch.randn(rows, len(out), rig.scale.rank, device=rig.device)

    def run() -> Tensor:
        lora_expand_(shrunk, lora, segments, y)
        return y

    def expected() -> Tensor:
        total = start.float()
        REFERENCE.lora_expand_(shrunk, lora, segments, total)
        return total

    return Case(
        run=run,
        expected=expected,
        reset=lambda: y.copy_(start),
        cost=rig.scale.shape.lora_expand(rows, count, len(out), sum(out), rig.scale.rank),
        tolerance=TRITON[rig.dtype],
        peers={"torch": partial(_torch_expand, shrunk.to(rig.dtype), lora, _rows_of(segments), y)},
    )


def _rows_of(segments: AdapterSegments) -> list[tuple[int, Tensor]]:
    """Each segment's slot and rows, read back once: torch's loop isn't made to wait for the device."""
    starts = segments.starts.tolist()
    return [(slot, segments.order[starts[g] : starts[g + 1]]) for g, slot in enumerate(segments.slots.tolist())]


def _torch_shrink(x: Tensor, lora: LoraSlots, segments: list[tuple[int, Tensor]]) -> None:
    """A GEMM of cuBLAS for each adapter, all slices in one."""
    for slot, rows in segments:
        x[rows] @ lora.a[slot].flatten(0, 1).T


def _torch_expand(shrunk: Tensor, lora: LoraSlots, segments: list[tuple[int, Tensor]], y: Tensor) -> None:
    """A GEMM of cuBLAS for each adapter and slice."""
    for slot, rows in segments:
        chosen = shrunk[rows]
        for k in range(len(lora.out_starts) - 1):
            columns = slice(lora.out_starts[k], lora.out_starts[k + 1])
            y[rows, columns] += chosen[:, k] @ lora.b[slot, :, columns]

"""Device memory of the adapters in use: a fixed number of slots, each of which holds one adapter's matrices.

A slot's matrices stand where the kernels read them: for each fused linear of the decoder `a[slot, layer, slice, rank,
in]` and `b[slot, layer, rank, out]`. Memory for a linear is taken when the first adapter that changes it arrives, so a
model without adapters pays nothing, and one whose adapters leave the MLP alone pays nothing for the MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

import torch
from torch import Tensor

from mlserve.adapters.host import HostAdapter, HostWeights
from mlserve.adapters.spec import BaseShape, Module, Site
from mlserve.errors import AdapterLimitError
from mlserve.kernels import LoraSlots

__all__ = ["AdapterSlots", "Projection", "RowScales"]


class Projection(Enum):
    """A linear of the decoder, by the modules that it is made of, in the order of its slices."""

    QKV = (Module.Q_PROJ, Module.K_PROJ, Module.V_PROJ)
    OUT = (Module.O_PROJ,)
    GATE_UP = (Module.GATE_PROJ, Module.UP_PROJ)
    DOWN = (Module.DOWN_PROJ,)
    EMBED = (Module.EMBED_TOKENS,)
    LM_HEAD = (Module.LM_HEAD,)

    @property
    def is_layered(self) -> bool:
        """Whether every layer has one."""
        return self not in (Projection.EMBED, Projection.LM_HEAD)


_PROJECTIONS = {module: (projection, k) for projection in Projection for k, module in enumerate(projection.value)}


@dataclass(frozen=True, slots=True)
class RowScales:
    """What DoRA does to the base model's output of one linear: y * scale + shift, for each slot that has DoRA."""

    scale: Tensor  # [slots, out] float32
    shift: Tensor  # [slots, out] float32: bias * (1 - scale)


class _Stack:
    """One projection: all slots, all layers."""

    def __init__(
        self,
        projection: Projection,
        base: BaseShape,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        sizes = [base.size(module) for module in projection.value]
        outs = [size[0] for size in sizes if size is not None]
        width = next(size[1] for size in sizes if size is not None)
        self.num_layers = base.num_layers if projection.is_layered else 1
        self.out_starts = (0, *accumulate(outs))
        self.a = torch.empty(num_slots, self.num_layers, len(outs), max_rank, width, dtype=dtype, device=device)
        self.b = torch.empty(num_slots, self.num_layers, max_rank, self.out_starts[-1], dtype=dtype, device=device)
        self.ranks = torch.zeros(self.num_layers, num_slots, len(outs), dtype=torch.int32)
        self.layers = [
            LoraSlots(self.a[:, i], self.b[:, i], self.ranks[i], self.out_starts) for i in range(self.num_layers)
        ]
        self.row_scales: list[RowScales] | None = None
        self.dora_slots: set[int] = set()

    def columns(self, k: int) -> slice:
        return slice(self.out_starts[k], self.out_starts[k + 1])

    def set_row_scales(self, slot: int, layer: int, k: int, weights: HostWeights) -> None:
        assert weights.row_scales is not None
        if self.row_scales is None:
            shape = (self.a.shape[0], self.out_starts[-1])
            self.row_scales = [
                RowScales(torch.ones(shape, device=self.a.device), torch.zeros(shape, device=self.a.device))
                for _ in range(self.num_layers)
            ]
        if slot not in self.dora_slots:
            self.dora_slots.add(slot)
            for scales in self.row_scales:
                scales.scale[slot] = 1.0
                scales.shift[slot] = 0.0
        scales = self.row_scales[layer]
        scales.scale[slot, self.columns(k)] = weights.row_scales.to(self.a.device)
        if weights.bias is not None:
            scales.shift[slot, self.columns(k)] = (weights.bias * (1 - weights.row_scales)).to(self.a.device)


class AdapterSlots:
    """`num_slots` adapters of up to `max_rank`. Which adapter is in which slot is the scheduler's business."""

    def __init__(
        self, base: BaseShape, num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.base = base
        self.num_slots = num_slots
        self.max_rank = max_rank
        self.dtype = dtype
        self.device = device
        self._stacks: dict[Projection, _Stack] = {}
        self._projections: list[frozenset[Projection]] = [frozenset()] * num_slots

    @torch.inference_mode()
    def write(self, slot: int, adapter: HostAdapter) -> None:
        """Put an adapter into a slot, over what was there. Raises `AdapterLimitError` if memory for it can't be had."""
        sites = {site: _PROJECTIONS[site.module] for site in adapter.weights}
        projections = frozenset(projection for projection, _ in sites.values())
        for projection in projections:
            self._stack(projection)
        for stack in self._stacks.values():
            stack.ranks[:, slot] = 0
            stack.dora_slots.discard(slot)
        self._projections[slot] = projections
        self._copy(slot, adapter.weights, sites)

    def projections(self, slots: set[int]) -> frozenset[Projection]:
        """The linears that any of these slots changes."""
        return frozenset().union(*(self._projections[slot] for slot in slots))

    def lora(self, projection: Projection, layer: int) -> LoraSlots:
        """One linear's matrices in all slots; only of projections that some slot changes."""
        return self._stacks[projection].layers[layer]

    def row_scales(self, projection: Projection, layer: int) -> RowScales | None:
        """One linear's DoRA scales; None if no slot has any."""
        scales = self._stacks[projection].row_scales
        return None if scales is None else scales[layer]

    def dora_slots(self, projection: Projection) -> set[int]:
        """The slots that have DoRA on it."""
        return self._stacks[projection].dora_slots

    @property
    def num_bytes(self) -> int:
        """Device memory that was taken so far."""
        return sum(stack.a.nbytes + stack.b.nbytes for stack in self._stacks.values())

    def _stack(self, projection: Projection) -> _Stack:
        stack = self._stacks.get(projection)
        if stack is None:
            try:
                stack = _Stack(projection, self.base, self.num_slots, self.max_rank, self.dtype, self.device)
            except RuntimeError as error:  # torch has no narrower one for a CPU
                raise AdapterLimitError(
                    f"there is no memory for {self.num_slots} slots of rank {self.max_rank} on "
                    f"{projection.name.lower()}: lower max_loras or max_lora_rank"
                ) from error
            self._stacks[projection] = stack
        return stack

    def _copy(
        self, slot: int, weights: Mapping[Site, HostWeights], sites: Mapping[Site, tuple[Projection, int]]
    ) -> None:
        """All matrices in two calls: an adapter has hundreds, and most of their time would be overhead."""
        targets, sources, bs, scalings, scaled_rows = [], [], [], [], []
        for site, lora in weights.items():
            projection, k = sites[site]
            stack, layer, rank = self._stacks[projection], site.layer or 0, lora.a.shape[0]
            b = stack.b[slot, layer, :rank, stack.columns(k)]
            targets += [stack.a[slot, layer, k, :rank], b]
            sources += [lora.a, lora.b]
            bs.append(b)
            scalings.append(lora.scaling)
            stack.ranks[layer, slot, k] = rank
            if lora.row_scales is not None:
                stack.set_row_scales(slot, layer, k, lora)
                scaled_rows.append((b, lora.row_scales))
        torch._foreach_copy_(targets, sources, non_blocking=True)
        torch._foreach_mul_(bs, scalings)
        for b, row_scales in scaled_rows:
            b *= row_scales.to(b.device, b.dtype)

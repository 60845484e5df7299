"""Device memory of the adapters in use: a fixed number of slots, each of which holds one adapter's matrices.

A slot's matrices stand where the kernels read them: for each fused linear of the decoder `a[slot, rank, layer, slice,
in]` and `b[slot, rank, layer, out]`. With the rank before the layer what an adapter of a lower rank uses of its slot is
one piece, and on a CPU a step reads it sooner: rows that are read side by side lie far apart, where the processor takes
them for streams of their own (tests/bench/LOG.md). Memory for a linear is taken when the first adapter that changes it
arrives, so a model without adapters pays nothing, and one whose adapters leave the MLP alone pays nothing for the MLP.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from mlserve.adapters.copy_stream import SlotCopies, slot_copies
from mlserve.adapters.host import HostAdapter, HostWeights
from mlserve.adapters.spec import BaseShape, Module, Site
from mlserve.errors import AdapterLimitError
from mlserve.kernels import LoraSlots, advise_huge_pages

__all__ = ["AdapterSlots", "Projection", "RowScales", "slots_bytes"]


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
    """What DoRA does to the base model's output of one linear: y * scale + shift. Slots without it have 1 and 0."""

    scale: Tensor  # [slots, out] float32
    shift: Tensor  # [slots, out] float32: bias * (1 - scale)


@dataclass(frozen=True, slots=True)
class _StackShape:
    """One projection over all slots and layers, as numbers."""

    num_slots: int
    num_layers: int
    max_rank: int
    width: int
    out_starts: tuple[int, ...]

    @classmethod
    def of(cls, projection: Projection, base: BaseShape, num_slots: int, max_rank: int) -> _StackShape:
        sizes = [size for size in map(base.size, projection.value) if size is not None]
        num_layers = base.num_layers if projection.is_layered else 1
        return cls(num_slots, num_layers, max_rank, sizes[0][1], (0, *accumulate(out for out, _ in sizes)))

    @property
    def num_slices(self) -> int:
        return len(self.out_starts) - 1

    @property
    def num_elements(self) -> int:
        """Of A and B."""
        per_rank = self.num_slices * self.width + self.out_starts[-1]
        return self.num_slots * self.num_layers * self.max_rank * per_rank


def slots_bytes(base: BaseShape, num_slots: int, max_rank: int, dtype: torch.dtype) -> int:
    """Device memory that slots will take once adapters have changed every linear, embedding and output layer too."""
    shapes = (_StackShape.of(projection, base, num_slots, max_rank) for projection in Projection)
    return sum(shape.num_elements for shape in shapes) * dtype.itemsize


class _Stack:
    """One projection: all slots, all layers."""

    def __init__(self, shape: _StackShape, dtype: torch.dtype, device: torch.device) -> None:
        slots, layers, slices = shape.num_slots, shape.num_layers, shape.num_slices
        self.shape = shape
        self.a = torch.empty(slots, shape.max_rank, layers, slices, shape.width, dtype=dtype, device=device)
        self.b = torch.empty(slots, shape.max_rank, layers, shape.out_starts[-1], dtype=dtype, device=device)
        advise_huge_pages(self.a)
        advise_huge_pages(self.b)
        self.ranks = torch.zeros(layers, slots, slices, dtype=torch.int32, device=device)
        self.layers = [
            LoraSlots(self.a[:, :, i].transpose(1, 2), self.b[:, :, i], self.ranks[i], shape.out_starts)
            for i in range(layers)
        ]
        self.row_scales: RowScales | None = None  # [layers, slots, out] each
        self.dora_slots: set[int] = set()

    def columns(self, k: int) -> slice:
        return slice(self.shape.out_starts[k], self.shape.out_starts[k + 1])

    def clear(self, slot: int) -> None:
        """The slot leaves this projection alone."""
        self.ranks[:, slot] = 0
        if slot in self.dora_slots:
            assert self.row_scales is not None
            self.dora_slots.remove(slot)
            self.row_scales.scale[:, slot] = 1.0
            self.row_scales.shift[:, slot] = 0.0

    def set_row_scales(self, slot: int, layer: int, k: int, weights: HostWeights) -> None:
        assert weights.row_scales is not None
        if self.row_scales is None:
            shape = (self.shape.num_layers, self.shape.num_slots, self.shape.out_starts[-1])
            device = self.a.device
            self.row_scales = RowScales(torch.ones(shape, device=device), torch.zeros(shape, device=device))
        self.dora_slots.add(slot)
        at = (layer, slot, self.columns(k))
        self.row_scales.scale[at] = weights.row_scales
        if weights.bias is not None:
            self.row_scales.shift[at] = weights.bias * (1 - weights.row_scales)


class AdapterSlots:
    """`num_slots` adapters of up to `max_rank`. Which adapter is in which slot is the scheduler's business."""

    def __init__(
        self,
        base: BaseShape,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        copies: SlotCopies | None = None,
    ) -> None:
        """`copies`: by default those that suit the device."""
        self.base = base
        self.num_slots = num_slots
        self.max_rank = max_rank
        self.dtype = dtype
        self.device = device
        self._copies = slot_copies(device) if copies is None else copies
        self._stacks: dict[Projection, _Stack] = {}
        self._projections: list[frozenset[Projection]] = [frozenset()] * num_slots

    @torch.inference_mode()
    def write(self, slot: int, adapter: HostAdapter) -> None:
        """Put an adapter into a slot, over what was there. Raises `AdapterLimitError` if memory for it can't be had.

        On a GPU it may still be under way afterwards: `before_use` orders it before what reads the slot.
        """
        sites = {site: _PROJECTIONS[site.module] for site in adapter.weights}
        projections = frozenset(projection for projection, _ in sites.values())
        for projection in projections:
            self._stack(projection)
        with self._copies.writing(slot):
            for stack in self._stacks.values():
                stack.clear(slot)
            self._projections[slot] = projections
            self._copy(slot, adapter.weights_on(self.device), sites)

    def before_use(self, slots: Set[int]) -> None:
        """To be called before what reads these slots is begun."""
        self._copies.before_use(slots)

    def put(self, array: NDArray[Any]) -> Tensor:
        """An array, on the slots' device; a GPU isn't waited for."""
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)

    @property
    def layout(self) -> frozenset[Projection]:
        """The linears that have memory: all that any slot changes, or once did. It only grows."""
        return frozenset(self._stacks)

    def projections(self, slots: Set[int]) -> frozenset[Projection]:
        """The linears that any of these slots changes."""
        return frozenset().union(*(self._projections[slot] for slot in slots))

    def lora(self, projection: Projection, layer: int) -> LoraSlots:
        """One linear's matrices in all slots; only of projections that some slot changes."""
        return self._stacks[projection].layers[layer]

    def row_scales(self, projection: Projection, layer: int) -> RowScales:
        """One linear's DoRA scales; only of projections that have `dora_slots`, or had them."""
        scales = self._stacks[projection].row_scales
        assert scales is not None
        return RowScales(scales.scale[layer], scales.shift[layer])

    def dora_slots(self, projection: Projection) -> frozenset[int]:
        """The slots that have DoRA on it."""
        return frozenset(self._stacks[projection].dora_slots)

    def with_dora(self, slots: Set[int]) -> frozenset[int]:
        """Those of the slots that have DoRA on any linear."""
        return frozenset(slots).intersection(frozenset().union(*(s.dora_slots for s in self._stacks.values())))

    @property
    def num_bytes(self) -> int:
        """Device memory that was taken so far."""
        return sum(stack.a.nbytes + stack.b.nbytes for stack in self._stacks.values())

    def _stack(self, projection: Projection) -> _Stack:
        stack = self._stacks.get(projection)
        if stack is None:
            shape = _StackShape.of(projection, self.base, self.num_slots, self.max_rank)
            try:
                stack = _Stack(shape, self.dtype, self.device)
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
        ranks = {p: torch.zeros_like(self._stacks[p].ranks[:, slot], device="cpu") for p in self._projections[slot]}
        for site, lora in weights.items():
            projection, k = sites[site]
            stack, layer, rank = self._stacks[projection], site.layer or 0, lora.a.shape[0]
            b = stack.b[slot, :rank, layer, stack.columns(k)]
            targets += [stack.a[slot, :rank, layer, k], b]
            sources += [lora.a, lora.b]
            bs.append(b)
            scalings.append(lora.scaling)
            ranks[projection][layer, k] = rank
            if lora.row_scales is not None:
                stack.set_row_scales(slot, layer, k, lora)
                scaled_rows.append((b, lora.row_scales))
        torch._foreach_copy_(targets, sources, non_blocking=True)
        torch._foreach_mul_(bs, scalings)
        for projection, slot_ranks in ranks.items():
            self._stacks[projection].ranks[:, slot] = self.put(slot_ranks.numpy())
        for b, row_scales in scaled_rows:
            b *= row_scales.to(b.device)

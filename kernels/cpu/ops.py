"""The native CPU operations under the signatures of `mlserve.kernels.Ops`."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from mlserve.kernels import Activation, AdapterSegments, Linear, LoraSlots, PagedBatch
from mlserve.kernels.cpu.build import load_extension

__all__ = ["CpuOps"]

_NUMBERS: dict[Activation | None, int] = {None: 0, Activation.SILU: 1, Activation.GELU_TANH: 2}  # kernels.h's


class CpuOps:
    """C++ with AVX2 or AVX-512, on torch's threads. Weights and KV in float32, bfloat16 or float16; float32 arithmetic.

    `pack_linear` lays the weight out anew in memory of its own: drop the original, or it is held twice. A row's result
    doesn't depend, to the bit, on which other rows or sequences share a call. Head sizes are multiples of 8.
    """

    name = "cpu"

    def __init__(self) -> None:
        """Raises KernelBuildError if the operations can't be built here."""
        self._native: ModuleType = load_extension()
        self._arena = self._native.Arena()  # the memory of this model's weights

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        packed: Linear = self._arena.pack(weight, bias)
        return packed

    def linear(
        self,
        x: Tensor,
        weight: Linear,
        adapters: tuple[LoraSlots, AdapterSegments] | None = None,
        activation: Activation | None = None,
    ) -> Tensor:
        y: Tensor
        if adapters is None:
            y = self._native.linear(x, weight, _NUMBERS[activation])
        else:
            lora, segments = adapters
            y = self._native.lora_linear(
                x,
                weight,
                _NUMBERS[activation],
                lora.a,
                lora.b,
                lora.ranks,
                lora.out_starts,
                segments.order,
                segments.starts,
                segments.slots,
            )
        return y

    def embedding(self, ids: Tensor, table: Linear) -> Tensor:
        y: Tensor = self._native.embedding(ids, table)
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y: Tensor = self._native.rms_norm(x, weight, eps)
        return y

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        y: Tensor = self._native.add_rms_norm(x, residual, weight, eps)
        return y

    def rope_(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        self._native.rope_(q, k, cos, sin)

    def kv_write(self, k: Tensor, v: Tensor, kv: Tensor, slot_mapping: Tensor) -> None:
        self._native.kv_write(k, v, kv, slot_mapping)

    def rope_kv_write(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, slot_mapping: Tensor
    ) -> None:
        self._native.rope_kv_write(q, k, v, cos, sin, kv, slot_mapping)

    def paged_attention(
        self,
        q: Tensor,
        kv: Tensor,
        batch: PagedBatch,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        out: Tensor = self._native.paged_attention(
            q,
            kv,
            batch.query_starts,
            batch.context_lens,
            batch.block_table,
            batch.block_starts,
            batch.visible_ends,
            scale,
            window,
            soft_cap,
        )
        return out

    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        y: Tensor = self._native.gated_activation(gate_up, _NUMBERS[activation])
        return y

    def lora_shrink(self, x: Tensor, lora: LoraSlots, segments: AdapterSegments) -> Tensor:
        shrunk: Tensor = self._native.lora_shrink(
            x, lora.a, lora.ranks, segments.order, segments.starts, segments.slots
        )
        return shrunk

    def lora_expand_(self, shrunk: Tensor, lora: LoraSlots, segments: AdapterSegments, y: Tensor) -> None:
        self._native.lora_expand_(
            shrunk, lora.b, lora.ranks, lora.out_starts, segments.order, segments.starts, segments.slots, y
        )

"""The Triton kernels under the signatures of `mlserve.kernels.Ops`."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from mlserve.kernels import Activation, AdapterSegments, Linear, LoraSlots, PagedBatch
from mlserve.kernels.reference import ReferenceLinear, ReferenceOps
from mlserve.kernels.triton.activation import gated_activation
from mlserve.kernels.triton.attention import paged_attention
from mlserve.kernels.triton.kv_cache import kv_write
from mlserve.kernels.triton.lora_expand import lora_expand_
from mlserve.kernels.triton.lora_shrink import lora_shrink
from mlserve.kernels.triton.norm import add_rms_norm, rms_norm
from mlserve.kernels.triton.rope import rope_, rope_kv_write

__all__ = ["TritonOps"]


class TritonOps:
    """For CUDA devices. Activations are in the weights' type; norms, softmax and sums in float32.

    Two operations have no kernel of ours. `linear` is cuBLAS, through torch: a GEMM in Triton would at best equal it.
    `embedding` is torch's gather, which is bound by memory as any would be.
    """

    name = "triton"

    def __init__(self) -> None:
        self._torch = ReferenceOps()

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> ReferenceLinear:
        return self._torch.pack_linear(weight, bias)

    def linear(
        self,
        x: Tensor,
        weight: Linear,
        adapters: tuple[LoraSlots, AdapterSegments] | None = None,
        activation: Activation | None = None,
    ) -> Tensor:
        y = self._torch.linear(x, weight)
        if adapters is not None:
            lora_expand_(lora_shrink(x, *adapters), *adapters, y)
        return y if activation is None else gated_activation(y, activation)

    def embedding(self, ids: Tensor, table: Linear) -> Tensor:
        return cast(ReferenceLinear, table).weight.index_select(0, ids)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return add_rms_norm(x, residual, weight, eps)

    def rope_(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        rope_(q, k, cos, sin)

    def kv_write(self, k: Tensor, v: Tensor, kv: Tensor, slot_mapping: Tensor) -> None:
        kv_write(k, v, kv, slot_mapping)

    def rope_kv_write(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, slot_mapping: Tensor
    ) -> None:
        rope_kv_write(q, k, v, cos, sin, kv, slot_mapping)

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
        return paged_attention(q, kv, batch, scale=scale, window=window, soft_cap=soft_cap)

    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        return gated_activation(gate_up, activation)

    def lora_shrink(self, x: Tensor, lora: LoraSlots, segments: AdapterSegments) -> Tensor:
        return lora_shrink(x, lora, segments)

    def lora_expand_(self, shrunk: Tensor, lora: LoraSlots, segments: AdapterSegments, y: Tensor) -> None:
        lora_expand_(shrunk, lora, segments, y)

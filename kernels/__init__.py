"""The operations that a decoder is made of: one signature each, several implementations.

`reference.py` is plain torch and documents what each operation computes; every other implementation is held to it.
`dispatch.select(device)` picks one implementation, once. Nothing here knows of models, requests or adapters.

Conventions: T tokens of the step, S sequences of the step, H hidden size, Hq/Hk query and key/value heads, D head size.
Activations are float32 on a CPU whatever the storage dtype of weights and KV.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

if __name__ != "mlserve.kernels":
    raise ImportError(f"{__name__!r} is mlserve's own mlserve.kernels: keep the repository off sys.path (python -P)")

__all__ = ["Activation", "AdapterSegments", "Linear", "LoraSlots", "Ops", "PagedBatch", "advise_huge_pages", "kv_pool"]

HUGE_PAGE = 2**21  # bytes
MADV_HUGEPAGE = 14  # <sys/mman.h> of Linux


class Activation(StrEnum):
    """Activation of a gated MLP."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Where each token of a step stands in the paged KV cache; the same for all layers.

    Sequence s owns query tokens [query_starts[s], query_starts[s + 1]) and blocks
    block_table[block_starts[s] : block_starts[s + 1]], in order. Its queries are the last tokens of its context:

        context:  [0 ............ context_lens[s] - query_len) already in the cache | [.., context_lens[s]) this step's
    """

    slot_mapping: Tensor  # [T] int64: block * block_size + offset, where each token's KV is written
    query_starts: Tensor  # [S + 1] int32
    context_lens: Tensor  # [S] int32: tokens in the cache after this step's are written
    block_table: Tensor  # [sum of blocks] int32: all sequences' block tables, one after the other
    block_starts: Tensor  # [S + 1] int32
    # [T] int32: each query sees the positions below this: its own + 1, or more where an image's tokens see each other.
    # It never falls within a sequence, nor exceeds its context. None: no query sees beyond itself.
    visible_ends: Tensor | None = None
    # How many sequences have a single query, for kernels that can't ask without waiting for the device. None: unknown.
    num_decodes: int | None = None


@dataclass(frozen=True, slots=True)
class AdapterSegments:
    """Which rows of a step each adapter slot acts on. Rows in no segment are the base model's, and cost nothing.

    Segment g gives slot slots[g] to the rows order[starts[g] : starts[g + 1]]. No row is in two, no slot has two.

    A captured graph has room for a fixed number of rows and segments. What a step doesn't need of it are empty segments
    (equal starts, any slot) and the end of `order` after starts[G], which is never read; the CPU operations refuse it.
    """

    order: Tensor  # [N] int64: rows of the step, ascending within a segment
    starts: Tensor  # [G + 1] int32
    slots: Tensor  # [G] int32


@dataclass(frozen=True, slots=True)
class LoraSlots:
    """One linear of one layer as all adapter slots change it. K is the number of slices: the parts of a fused weight,
    of which each has its own low-rank pair (3 of qkv_proj, 2 of gate_up_proj, otherwise 1).

    What lies beyond a slot's rank is never read and may be garbage.
    """

    a: Tensor  # [slots, K, R, in], usually a strided view of all layers; rows are dense
    b: Tensor  # [slots, R, out], scaling included; slice k uses columns [out_starts[k], out_starts[k + 1])
    ranks: Tensor  # [slots, K] int32 on the matrices' device, 0 to R; 0: the slot leaves that slice alone
    out_starts: tuple[int, ...]  # K + 1, from 0 to out


class Linear(Protocol):
    """A weight as one implementation holds it (`Ops.pack_linear` makes it)."""

    @property
    def out_features(self) -> int: ...

    @property
    def in_features(self) -> int: ...


class Ops(Protocol):
    """One implementation of all operations."""

    name: str

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Take over `weight: [out, in]` (any storage dtype) and `bias: [out]`; may keep it in place or re-lay it."""
        ...

    def linear(
        self,
        x: Tensor,
        weight: Linear,
        adapters: tuple[LoraSlots, AdapterSegments] | None = None,
        activation: Activation | None = None,
    ) -> Tensor:
        """`x: [T, in] -> [T, out]`: x @ weight.T + bias, computed in x's dtype.

        With `adapters` `lora_expand_` of `lora_shrink` of x is added. With `activation` the result is
        `gated_activation` of all that: `[T, out / 2]`.
        """
        ...

    def embedding(self, ids: Tensor, table: Linear) -> Tensor:
        """`ids: [T] int64 -> [T, in]` rows of the table `[vocabulary, in]`, in the compute dtype."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x: [..., N] -> [..., N]`: x / sqrt(mean(x^2) + eps) * weight, over the last dimension (any leading ones)."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`residual += x` in place, then the norm of the residual. `x, residual: [T, H] -> [T, H]`."""
        ...

    def rope_(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate `q: [T, Hq, D]` and `k: [T, Hk, D]` in place (rows may be strided views of one qkv matrix).

        `cos, sin: [T, R / 2]` float32. NeoX layout: pairs (i, i + R / 2) of the first R <= D dimensions.
        """
        ...

    def kv_write(self, k: Tensor, v: Tensor, kv: Tensor, slot_mapping: Tensor) -> None:
        """Store `k, v: [T, Hk, D]` (may be strided views) into one layer's `kv: [blocks, 2, block_size, Hk, D]` (a
        strided view of the pool) at `slot_mapping`, in kv's dtype."""
        ...

    def rope_kv_write(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, slot_mapping: Tensor
    ) -> None:
        """`rope_(q, k, ...)` and `kv_write(k, v, ...)` together: q is rotated in place, and the cache holds k rotated.

        What k itself holds afterwards is left open.
        """
        ...

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
        """Causal attention of ragged queries over paged KV. `q: [T, Hq, D]` (may be a strided view) `-> [T, Hq * D]`.

        Query head h reads KV head h // (Hq / Hk). With `window` w a query at position p sees nothing up to p - w.
        With `soft_cap` c scores become c * tanh(scores / c) before the softmax. Blocks are read in place.
        """
        ...

    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """`gate_up: [T, 2 * I] -> [T, I]`: act(gate_up[:, :I]) * gate_up[:, I:]."""
        ...

    def lora_shrink(self, x: Tensor, lora: LoraSlots, segments: AdapterSegments) -> Tensor:
        """`x: [T, in] -> [N, K, R]` float32: row n is a[slot, k, :rank] @ x[order[n]], for all slices at once.

        What lies beyond a slot's rank is undefined. Punica's SGMV (Chen et al. 2023), for slices of unequal rank.
        """
        ...

    def lora_expand_(self, shrunk: Tensor, lora: LoraSlots, segments: AdapterSegments, y: Tensor) -> None:
        """`y: [T, out]`: y[order[n], columns of k] += shrunk[n, k, :rank] @ b[slot, :rank, columns of k], in place.

        `shrunk: [N, K, R]` is what `lora_shrink` gave for the same segments.
        """
        ...


def kv_pool(
    num_blocks: int,
    num_layers: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """The whole KV memory: `[num_blocks, num_layers, 2, block_size, Hk, D]`, block-major.

    One block is one contiguous page with all layers in it, so that moving a block is one copy. `pool[:, layer]` is what
    the operations take.
    """
    pool = torch.empty(num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim, dtype=dtype, device=device)
    advise_huge_pages(pool)
    return pool.zero_()  # not torch.zeros: that would leave every page to be made when a step first writes to it


def advise_huge_pages(tensor: Tensor) -> None:
    """Ask for 2 MB pages for a tensor that no step has written to: what a step reads here and there, from block to
    block and from slot to slot, waits for address translation where pages have 4 kB.

    A hint, for CPU tensors on Linux: where the kernel doesn't follow it, everything works, slower.
    """
    if tensor.device.type != "cpu" or sys.platform != "linux":
        return
    begin = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    length = tensor.data_ptr() + tensor.nbytes - begin
    if length >= HUGE_PAGE:
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), MADV_HUGEPAGE)

"""Every operation in plain torch: the definition that all other implementations are tested against.

It runs on any device. On a CPU arithmetic is float32 whatever the storage dtype of weights and KV; on a GPU it is the
weights' dtype, with norms and softmax in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from mlserve.kernels import Activation, AdapterSegments, Linear, LoraSlots, PagedBatch

__all__ = ["ReferenceLinear", "ReferenceOps"]


@dataclass(frozen=True, slots=True)
class ReferenceLinear:
    """A weight left as it came."""

    weight: Tensor  # [out, in], any storage dtype
    bias: Tensor | None  # [out]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]


class ReferenceOps:
    """Plain torch. See `mlserve.kernels.Ops` for the signatures' contract."""

    name = "reference"

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> ReferenceLinear:
        return ReferenceLinear(weight, bias)

    def linear(
        self,
        x: Tensor,
        weight: Linear,
        adapters: tuple[LoraSlots, AdapterSegments] | None = None,
        activation: Activation | None = None,
    ) -> Tensor:
        """`x: [T, in] -> [T, out]`; `y = x @ weight.T + bias`, with the weight converted to x's dtype.

        Then `y += b @ (a @ x)` of each row's adapter, and `act(gate) * up` of y's halves.
        """
        packed = cast(ReferenceLinear, weight)
        bias = None if packed.bias is None else packed.bias.to(x.dtype)
        y = functional.linear(x, packed.weight.to(x.dtype), bias)
        if adapters is not None:
            self.lora_expand_(self.lora_shrink(x, *adapters), *adapters, y)
        return y if activation is None else self.gated_activation(y, activation)

    def embedding(self, ids: Tensor, table: Linear) -> Tensor:
        """`ids: [T] -> [T, in]`; `y[t] = weight[ids[t]]`, in float32 on a CPU and the table's dtype elsewhere."""
        weight = cast(ReferenceLinear, table).weight
        rows = weight[ids]
        return rows.float() if weight.device.type == "cpu" else rows

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`y = x / sqrt(mean(x^2) + eps) * weight` over the last dimension, in float32."""
        x32 = x.float()
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
        return (x32 * scale * weight.float()).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`residual += x` in place; `y = rms_norm(residual)`."""
        residual += x
        return self.rms_norm(residual, weight, eps)

    def rope_(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        """`(a, b) -> (a cos - b sin, b cos + a sin)` for each pair `(i, i + R / 2)` of the first R dimensions."""
        half = cos.shape[1]
        cos, sin = cos[:, None, :], sin[:, None, :]  # [T, 1, R / 2]: the same for all heads
        for heads in (q, k):
            a, b = heads[..., :half].float(), heads[..., half : 2 * half].float()
            rotated_a, rotated_b = a * cos - b * sin, b * cos + a * sin  # before writing: a and b may be views of heads
            heads[..., :half], heads[..., half : 2 * half] = rotated_a, rotated_b

    def kv_write(self, k: Tensor, v: Tensor, kv: Tensor, slot_mapping: Tensor) -> None:
        """`kv[slot // block_size, (0 | 1), slot % block_size] = (k | v)[t]` with `slot = slot_mapping[t]`."""
        block_size = kv.shape[2]
        block, offset = slot_mapping // block_size, slot_mapping % block_size
        kv[block, 0, offset] = k.to(kv.dtype)
        kv[block, 1, offset] = v.to(kv.dtype)

    def rope_kv_write(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, slot_mapping: Tensor
    ) -> None:
        """`rope_`, then `kv_write`."""
        self.rope_(q, k, cos, sin)
        self.kv_write(k, v, kv, slot_mapping)

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
        """`q: [T, Hq, D]`, `kv: [blocks, 2, block_size, Hk, D]` `-> [T, Hq * D]`, one sequence at a time."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        query_starts, block_starts = batch.query_starts.tolist(), batch.block_starts.tolist()
        for s, context_len in enumerate(batch.context_lens.tolist()):
            queries = slice(query_starts[s], query_starts[s + 1])
            blocks = batch.block_table[block_starts[s] : block_starts[s + 1]].long()
            keys, values = _gather_context(kv, blocks, context_len)
            ends = None if batch.visible_ends is None else batch.visible_ends[queries]
            out[queries] = _causal_attention(q[queries], keys, values, scale, window, soft_cap, ends).to(q.dtype)
        return out.flatten(1)

    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """`gate_up: [T, 2 * I] -> [T, I]`: `act(gate) * up`."""
        gate, up = gate_up.chunk(2, dim=-1)
        match activation:
            case Activation.SILU:
                return functional.silu(gate) * up
            case Activation.GELU_TANH:
                return functional.gelu(gate, approximate="tanh") * up

    def lora_shrink(self, x: Tensor, lora: LoraSlots, segments: AdapterSegments) -> Tensor:
        """`x: [T, in] -> [N, K, R]`; `y[n, k, :rank] = a[slot, k, :rank] @ x[order[n]]`, one segment at a time."""
        num_slices, max_rank = lora.a.shape[1:3]
        out = torch.empty(len(segments.order), num_slices, max_rank, dtype=torch.float32, device=x.device)
        for rows, slot in _segments(segments):
            inputs = x[segments.order[rows]].float()
            for k, rank in enumerate(lora.ranks[slot].tolist()):
                out[rows, k, :rank] = inputs @ lora.a[slot, k, :rank].float().T
        return out

    def lora_expand_(self, shrunk: Tensor, lora: LoraSlots, segments: AdapterSegments, y: Tensor) -> None:
        """`y[order[n], columns of k] += shrunk[n, k, :rank] @ b[slot, :rank, columns of k]`, one segment at a time."""
        for rows, slot in _segments(segments):
            order = segments.order[rows]
            for k, rank in enumerate(lora.ranks[slot].tolist()):
                columns = slice(lora.out_starts[k], lora.out_starts[k + 1])
                delta = shrunk[rows, k, :rank] @ lora.b[slot, :rank, columns].float()
                y[order, columns] += delta.to(y.dtype)


def _segments(segments: AdapterSegments) -> Iterator[tuple[slice, int]]:
    """Where each segment's rows stand in `order`, and its slot."""
    starts = segments.starts.tolist()
    for g, slot in enumerate(segments.slots.tolist()):
        yield slice(starts[g], starts[g + 1]), slot


def _gather_context(kv: Tensor, blocks: Tensor, context_len: int) -> tuple[Tensor, Tensor]:
    """The context's keys and values, `[context_len, Hk, D]` float32 each; slots after the context are left out."""
    gathered = kv[blocks].float()  # [n, 2, block_size, Hk, D]
    keys, values = gathered.unbind(1)
    return keys.flatten(0, 1)[:context_len], values.flatten(0, 1)[:context_len]


def _causal_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    visible_ends: Tensor | None,
) -> Tensor:
    """`q: [n, Hq, D]`, `keys, values: [L, Hk, D]` `-> [n, Hq, D]` float32; the queries are the last n positions."""
    context_len, num_queries = keys.shape[0], q.shape[0]
    first_query = context_len - num_queries
    # keys before every query's window may be garbage (their blocks may have been given away): cut, not just masked
    first_key = 0 if window is None else max(0, first_query - window + 1)
    group = q.shape[1] // keys.shape[1]
    keys = keys[first_key:].repeat_interleave(group, dim=1)  # [L', Hq, D]
    values = values[first_key:].repeat_interleave(group, dim=1)

    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    query_pos = torch.arange(first_query, context_len, device=q.device)[:, None]
    key_pos = torch.arange(first_key, context_len, device=q.device)[None, :]
    visible = key_pos <= query_pos if visible_ends is None else key_pos < visible_ends[:, None]
    if window is not None:
        visible &= key_pos > query_pos - window
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)

"""Paged attention of sequences with several queries: prompts and chunks of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlserve.kernels import PagedBatch
from mlserve.kernels.triton.configs import Launch
from mlserve.kernels.triton.devices import HOPPER, Capability
from mlserve.kernels.triton.paging import (
    KeyHead,
    attend_keys,
    empty_softmax,
    find_sequence,
    load_rows,
    score_args,
    sequence_args,
    stride_args,
)

__all__ = ["PrefillTile", "prefill_launch", "prefill_tile"]


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """What one program of `_prefill_kernel` computes, and with what."""

    block_m: int  # rows: queries times the query heads that share a key head
    block_n: int  # keys per step
    num_warps: int
    num_stages: int


def prefill_tile(head_dim: int, dtype: torch.dtype, capability: Capability) -> PrefillTile:
    """The largest tile whose registers suffice: tests/kernels/triton/resources has the compiler's figures."""
    if dtype == torch.float32:  # no tensor cores: operands pass through registers
        if head_dim <= 64:
            return PrefillTile(block_m=32, block_n=32, num_warps=4, num_stages=1)
        return PrefillTile(block_m=32, block_n=16, num_warps=8, num_stages=1)
    if head_dim > 128:
        return PrefillTile(block_m=64, block_n=32, num_warps=8, num_stages=2)
    if head_dim <= 64 or capability >= HOPPER:
        return PrefillTile(block_m=128, block_n=64, num_warps=8, num_stages=2)
    # Before Hopper queries stay in registers, and 128 rows would spill. Two of these run at once on a multiprocessor.
    return PrefillTile(block_m=64, block_n=64, num_warps=4, num_stages=2)


def prefill_launch(
    q: Tensor,
    kv: Tensor,
    batch: PagedBatch,
    out: Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    capability: Capability,
) -> Launch:
    """Fills the rows of `out: [T, Hq, D]` that belong to sequences with more than one query."""
    num_tokens, num_heads, head_dim = q.shape
    block_size, num_kv_heads = kv.shape[2:4]
    group = num_heads // num_kv_heads
    num_sequences = len(batch.context_lens)
    tile = prefill_tile(head_dim, q.dtype, capability)
    block_m = max(tile.block_m, triton.next_power_of_2(group))
    return Launch(
        _prefill_kernel,
        (num_tokens // (block_m // group) + num_sequences, num_kv_heads),  # as `find_sequence` lays tiles out
        args={
            "q_pointer": q,
            "kv_pointer": kv,
            "out_pointer": out,
            **sequence_args(batch),
            "visible_ends": batch.visible_ends,
            "num_sequences": num_sequences,
            **score_args(scale, window, soft_cap),
            **stride_args(q, kv),
        },
        constants={
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": block_size,
            "BLOCK_M": block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_D": triton.next_power_of_2(head_dim),
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@triton.jit(do_not_specialize=["num_sequences"])
def _prefill_kernel(
    q_pointer, kv_pointer, out_pointer, query_starts, context_lens, block_table, block_starts,
    visible_ends, num_sequences, scale, window, soft_cap,
    stride_q_token, stride_q_head, stride_block, stride_values, stride_slot, stride_kv_head,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One tile of one sequence's queries, all heads of a group, over the keys that any of them sees.

    Row r is query r // GROUP of the tile under head r % GROUP of the group: each key is read once for all of them.
    """
    tile_queries: tl.constexpr = BLOCK_M // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles of a sequence see most keys: they go first
    sequence, first_tile = find_sequence(query_starts, num_sequences, tile, tile_queries)
    first_row = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - first_row
    first_query = (tile - first_tile) * tile_queries
    if (first_query >= num_queries) | (num_queries == 1):  # an empty tile, or one of attention_decode
        return
    kv_head = tl.program_id(1)
    context_len = tl.load(context_lens + sequence)

    rows = tl.arange(0, BLOCK_M)
    queries = first_query + rows // GROUP
    valid = (queries < num_queries) & (rows < tile_queries * GROUP)
    tokens = (first_row + queries).to(tl.int64)  # of the step
    heads = kv_head * GROUP + rows % GROUP
    q = load_rows(q_pointer, tokens * stride_q_token + heads * stride_q_head, valid, HEAD_DIM, BLOCK_D)

    # positions:  first .. first + tile_queries | those of the queries, and what each sees: [begins, ends)
    positions = context_len - num_queries + queries
    first = context_len - num_queries + first_query
    end = tl.minimum(first + tile_queries, context_len)
    full_end = first + 1  # the first query sees all below this, and so do the others
    ends = positions + 1
    if visible_ends is not None:
        ends = tl.load(visible_ends + tokens, mask=valid, other=0)
        end = tl.max(ends)
    begin = 0
    full_begin = 0  # the last query sees all from this on, and so do the others
    begins = None
    if window is not None:
        begins = positions - window + 1
        begin = tl.maximum(first - window + 1, 0)
        full_begin = tl.maximum(tl.minimum(first + tile_queries, context_len) - window, 0)

    # keys:  begin .. at a window's edge .. left .. seen by all rows .. right .. beyond the first query .. end
    left = tl.minimum(begin + tl.cdiv(full_begin - begin, BLOCK_N) * BLOCK_N, end)
    right = left + tl.maximum(full_end - left, 0) // BLOCK_N * BLOCK_N
    head = KeyHead(
        kv_pointer + kv_head * stride_kv_head,
        kv_pointer + kv_head * stride_kv_head + stride_values,
        block_table + tl.load(block_starts + sequence),
        stride_block,
        stride_slot,
    )
    state = empty_softmax(BLOCK_M, BLOCK_D)
    if window is not None:
        state = attend_keys(
            q, head, state, begin, left, begins, ends, scale, soft_cap, HEAD_DIM, BLOCK_SIZE, BLOCK_N, True
        )
    state = attend_keys(
        q, head, state, left, right, begins, ends, scale, soft_cap, HEAD_DIM, BLOCK_SIZE, BLOCK_N, False
    )
    state = attend_keys(q, head, state, right, end, begins, ends, scale, soft_cap, HEAD_DIM, BLOCK_SIZE, BLOCK_N, True)
    total = tl.where(valid, state.total, 1.0)  # a row that isn't valid may have seen nothing
    out = (state.acc / total[:, None]).to(out_pointer.dtype.element_ty)
    out_rows = (tokens * (tl.num_programs(1) * GROUP) + heads) * HEAD_DIM
    dims = tl.arange(0, BLOCK_D)
    at = out_pointer + out_rows[:, None] + dims[None, :]
    tl.store(at, out, mask=valid[:, None] & (dims < HEAD_DIM)[None, :])

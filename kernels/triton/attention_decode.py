"""Paged attention of sequences with one query: decoding, by splits of the context (Flash-Decoding, Dao et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlserve.kernels import PagedBatch
from mlserve.kernels.triton.configs import Launch
from mlserve.kernels.triton.paging import (
    KeyHead,
    attend_keys,
    empty_softmax,
    find_split,
    load_rows,
    score_args,
    sequence_args,
    stride_args,
)

__all__ = ["DecodeTile", "decode_launches", "decode_tile"]

# Positions of a context that one program attends to at once. Fixed, so that a row's result doesn't depend on the batch.
# Each split writes D + 1 float32 per head for 2 * 256 * D elements read: 3 % at bf16 and a group of 4.
SPLIT = 256
# Programs that fill a large GPU several times over. More would mostly find nothing to do.
ENOUGH_PROGRAMS = 4096
MIN_ROWS = 16  # of a product on tensor cores


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """What one program of `_decode_kernel` computes with."""

    block_n: int  # keys per step; divides SPLIT
    num_warps: int
    num_stages: int


def decode_tile(head_dim: int, dtype: torch.dtype) -> DecodeTile:
    """The tile for a head size and a type of queries; tests/kernels/triton keeps the compiler's figures of each."""
    if dtype == torch.float32:
        return DecodeTile(block_n=32, num_warps=4, num_stages=1)
    if head_dim <= 128:
        return DecodeTile(block_n=64, num_warps=4, num_stages=2)
    return DecodeTile(block_n=32, num_warps=4, num_stages=2)


def decode_launches(
    q: Tensor, kv: Tensor, batch: PagedBatch, out: Tensor, scale: float, window: int | None, soft_cap: float | None
) -> tuple[Launch, Launch]:
    """Fill the rows of `out: [T, Hq, D]` that belong to sequences with one query, one after the other.

    Such a query is the last token and sees its whole context, so that `visible_ends` doesn't matter. How many programs
    share a sequence's splits is decided from shapes alone, and changes no result.
    """
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = kv.shape[2:4]
    group = num_heads // num_kv_heads
    num_sequences = len(batch.context_lens)
    table_splits = len(batch.block_table) * block_size // SPLIT
    num_splits = table_splits + num_sequences  # as `find_split` lays them out
    programs = min(table_splits + 1, max(1, ENOUGH_PROGRAMS // (num_sequences * num_kv_heads)))
    tile = decode_tile(head_dim, q.dtype)
    shape = {
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "SPLIT": SPLIT,
        "BLOCK_D": triton.next_power_of_2(head_dim),
    }
    partial = {
        "partial": torch.empty(num_splits, num_heads, head_dim, dtype=torch.float32, device=q.device),
        "partial_lse": torch.empty(num_splits, num_heads, dtype=torch.float32, device=q.device),
    }
    attend = Launch(
        _decode_kernel,
        (num_sequences, num_kv_heads, programs),
        args={
            "q_pointer": q,
            "kv_pointer": kv,
            **partial,
            **sequence_args(batch),
            **score_args(scale, window, soft_cap),
            **stride_args(q, kv),
        },
        constants={
            **shape,
            "GROUP": group,
            "BLOCK_M": max(MIN_ROWS, triton.next_power_of_2(group)),
            "BLOCK_N": tile.block_n,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    merge = Launch(
        _merge_kernel,
        (num_sequences, num_heads),
        args={
            **partial,
            "out_pointer": out,
            "query_starts": batch.query_starts,
            "context_lens": batch.context_lens,
            "block_starts": batch.block_starts,
            "window": window,
        },
        constants={**shape, "BLOCK_SPLITS": 16},
    )
    return attend, merge


@triton.jit
def _decode_kernel(
    q_pointer, kv_pointer, partial, partial_lse,
    query_starts, context_lens, block_table, block_starts, scale, window, soft_cap,
    stride_q_token, stride_q_head, stride_block, stride_values, stride_slot, stride_kv_head,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Some splits of one sequence's context, under all query heads of a group: each one's result and log2-sum-exp2."""
    sequence, kv_head = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_starts + sequence)
    if tl.load(query_starts + sequence + 1) - token != 1:  # one of attention_prefill
        return
    context_len = tl.load(context_lens + sequence)
    block_start = tl.load(block_starts + sequence)
    first_key = 0 if window is None else tl.maximum(context_len - window, 0)

    rows = tl.arange(0, BLOCK_M)
    valid = rows < GROUP
    heads = kv_head * GROUP + rows
    q = load_rows(q_pointer + token.to(tl.int64) * stride_q_token, heads * stride_q_head, valid, HEAD_DIM, BLOCK_D)
    head = KeyHead(
        kv_pointer + kv_head * stride_kv_head,
        kv_pointer + kv_head * stride_kv_head + stride_values,
        block_table + block_start,
        stride_block,
        stride_slot,
    )
    ends = tl.zeros([BLOCK_M], tl.int32) + context_len
    for split in range(first_key // SPLIT + tl.program_id(2), tl.cdiv(context_len, SPLIT), tl.num_programs(2)):
        begin = tl.maximum(split * SPLIT, first_key)
        end = tl.minimum(split * SPLIT + SPLIT, context_len)
        state = attend_keys(
            q, head, empty_softmax(BLOCK_M, BLOCK_D), begin, end, None, ends, scale, soft_cap,
            HEAD_DIM, BLOCK_SIZE, BLOCK_N, True,
        )  # fmt: skip
        row = (find_split(block_start, sequence, split, BLOCK_SIZE, SPLIT)) * (tl.num_programs(1) * GROUP) + heads
        dims = tl.arange(0, BLOCK_D)
        at = partial + row[:, None] * HEAD_DIM + dims[None, :]
        tl.store(at, state.acc / state.total[:, None], mask=valid[:, None] & (dims < HEAD_DIM)[None, :])
        tl.store(partial_lse + row, state.peak + tl.log2(state.total), mask=valid)


@triton.jit
def _merge_kernel(
    partial, partial_lse, out_pointer, query_starts, context_lens, block_starts, window,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One row of the result from its splits: their mean, weighted by the sums that each was divided by."""
    sequence, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    token = tl.load(query_starts + sequence)
    if tl.load(query_starts + sequence + 1) - token != 1:
        return
    context_len = tl.load(context_lens + sequence)
    first_split = 0 if window is None else tl.maximum(context_len - window, 0) // SPLIT
    num_splits = tl.cdiv(context_len, SPLIT)
    first_row = find_split(tl.load(block_starts + sequence), sequence, 0, BLOCK_SIZE, SPLIT)

    dims = tl.arange(0, BLOCK_D)
    peak = float("-inf")
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for begin in range(first_split, num_splits, BLOCK_SPLITS):
        splits = begin + tl.arange(0, BLOCK_SPLITS)
        valid = splits < num_splits
        rows = (first_row + splits) * num_heads + head
        lse = tl.load(partial_lse + rows, mask=valid, other=float("-inf"))
        values = tl.load(
            partial + rows[:, None] * HEAD_DIM + dims[None, :],
            mask=valid[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        new_peak = tl.maximum(peak, tl.max(lse))
        decay = tl.exp2(peak - new_peak)
        weights = tl.exp2(lse - new_peak)
        total = total * decay + tl.sum(weights)
        acc = acc * decay + tl.sum(weights[:, None] * values, 0)
        peak = new_peak
    at = out_pointer + (token.to(tl.int64) * num_heads + head) * HEAD_DIM + dims
    tl.store(at, (acc / total).to(out_pointer.dtype.element_ty), mask=dims < HEAD_DIM)

"""A @ x of many adapters: `shrunk[n, k, :rank] = a[slot, k, :rank] @ x[order[n]]`, all slices and segments at once.

It is bound by reading A: a program takes two ranks of one row, or 16 to 64 ranks of many rows on tensor cores (`Form`).
Where that leaves too few programs to draw on the memory of a whole GPU, `in` is split (split-K): each split writes its
partial sums, and a second kernel adds them. Splits depend on `in` and the form alone and are added in order, never by
atomics: a row has the same bits alone and in any batch of the same form.

Punica's SGMV and BGMV (Chen et al. 2023).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlserve.kernels import AdapterSegments, LoraSlots
from mlserve.kernels.triton.configs import Argument, KernelConfig, Launch
from mlserve.kernels.triton.lora_segments import (
    Form,
    check,
    find_row,
    find_tile,
    max_tiles,
    meta_batch,
    search_width,
)

__all__ = ["configs", "lora_shrink"]


def lora_shrink(x: Tensor, lora: LoraSlots, segments: AdapterSegments) -> Tensor:
    """`x: [T, in] -> [N, K, R]` float32: row n is a[slot, k, :rank] @ x[order[n]].

    Undefined beyond a slot's rank, and in rows of `order` after the last segment. Raises ValueError for shapes that
    don't fit together. Captures into a graph.
    """
    check(lora, segments)
    if x.shape[1] != lora.a.shape[3] or x.stride(1) != 1:
        raise ValueError(f"x must be [T, {lora.a.shape[3]}] and dense along in, it is {[*x.shape]}")
    num_rows, (num_slices, max_rank) = len(segments.order), lora.a.shape[1:3]
    shrunk = torch.empty(num_rows, num_slices, max_rank, dtype=torch.float32, device=x.device)
    for launch in _launches(x, lora, segments, shrunk):
        launch.run()
    return shrunk


@dataclass(frozen=True, slots=True)
class _Tile:
    """What one program computes."""

    rows: int
    ranks: int
    width: int  # of `in`, at a time
    split_width: int  # of `in`, in all
    num_warps: int
    num_stages: int


def _tile(form: Form, max_rank: int, dtype: torch.dtype) -> _Tile:
    """The configurations that are used, by the form, the ranks and the dtype."""
    if form is Form.ROW:
        return _Tile(rows=1, ranks=2, width=2048, split_width=4096, num_warps=4, num_stages=1)
    ranks = 16 if max_rank <= 16 else 64
    if dtype == torch.float32:  # no tensor cores: a dot's operands are in registers, and 64 rows of them spill on sm_80
        rows = 16 if form is Form.SMALL else 32
        return _Tile(rows=rows, ranks=ranks, width=32, split_width=1024, num_warps=4, num_stages=2)
    if form is Form.SMALL:
        return _Tile(rows=16, ranks=ranks, width=128, split_width=1024, num_warps=4, num_stages=3)
    num_warps = 4 if ranks == 16 else 8  # with 4 warps for 64 ranks, 220 registers on sm_80
    return _Tile(rows=64, ranks=ranks, width=64, split_width=4096, num_warps=num_warps, num_stages=3)


def _launches(x: Tensor, lora: LoraSlots, segments: AdapterSegments, shrunk: Tensor) -> list[Launch]:
    num_rows, num_slices, max_rank = shrunk.shape
    tile = _tile(Form.of(num_rows), max_rank, x.dtype)
    size = x.shape[1]
    num_splits = max(1, triton.cdiv(size, tile.split_width))
    sums = shrunk if num_splits == 1 else shrunk.new_empty(num_splits, *shrunk.shape)
    rank_blocks = triton.cdiv(max_rank, tile.ranks)
    args: dict[str, Argument] = {
        "x": x,
        "a": lora.a,
        "ranks": lora.ranks,
        "order": segments.order,
        "starts": segments.starts,
        "slots": segments.slots,
        "sums": sums,
        "num_segments": len(segments.slots),
        "num_rows": num_rows,
        "num_slices": num_slices,
        "max_rank": max_rank,
        "size": size,
        "x_stride": x.stride(0),
        "a_slot_stride": lora.a.stride(0),
        "a_slice_stride": lora.a.stride(1),
        "a_rank_stride": lora.a.stride(2),
    }
    constants = {
        "SEARCH_WIDTH": search_width(segments),
        "BLOCK_R": tile.ranks,
        "BLOCK_H": tile.width,
        "SPLIT_WIDTH": tile.split_width,
    }
    if tile.rows == 1:
        kernel, programs = _shrink_row, num_rows
    else:
        kernel, programs = _shrink_tile, max_tiles(segments, tile.rows)
        constants["BLOCK_M"] = tile.rows
    grid = (programs, num_slices * rank_blocks, num_splits)
    launches = [Launch(kernel, grid, args, constants, tile.num_warps, tile.num_stages)]
    if num_splits > 1:
        launches.append(_sum_launch(sums, shrunk))
    return launches


def _sum_launch(sums: Tensor, shrunk: Tensor) -> Launch:
    block = 512
    args: dict[str, Argument] = {"sums": sums, "shrunk": shrunk, "num_splits": len(sums), "count": shrunk.numel()}
    return Launch(_add_splits, (triton.cdiv(shrunk.numel(), block),), args, {"BLOCK": block}, num_warps=4)


@triton.jit(do_not_specialize=["num_segments", "num_rows", "num_slices", "max_rank"])
def _shrink_row(
    x,  # [T, in]
    a,  # [slots, K, R, in]
    ranks,  # [slots, K] int32
    order,  # [N] int64
    starts,  # [G + 1] int32
    slots,  # [G] int32
    sums,  # [splits, N, K, R] float32
    num_segments,
    num_rows,
    num_slices,
    max_rank,
    size,
    x_stride,
    a_slot_stride,
    a_slice_stride,
    a_rank_stride,
    SEARCH_WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    SPLIT_WIDTH: tl.constexpr,
):
    """sums[split, n, k, r] = sum of a[slot, k, r, h] * x[order[n], h] over the split's h. Grid: n, (k, r), split."""
    n = tl.program_id(0)
    segment = find_row(starts, num_segments, n, SEARCH_WIDTH)
    if segment >= num_segments:
        return
    rank_blocks = tl.cdiv(max_rank, BLOCK_R)
    k, first_rank = tl.program_id(1) // rank_blocks, tl.program_id(1) % rank_blocks * BLOCK_R
    slot = tl.load(slots + segment).to(tl.int64)
    rank = tl.load(ranks + slot * num_slices + k)
    if first_rank >= rank:
        return

    split = tl.program_id(2)
    r = first_rank + tl.arange(0, BLOCK_R)
    h = split * SPLIT_WIDTH + tl.arange(0, BLOCK_H)
    x += tl.load(order + n) * x_stride
    a += slot * a_slot_stride + k.to(tl.int64) * a_slice_stride + r[:, None].to(tl.int64) * a_rank_stride
    total = tl.zeros([BLOCK_R, BLOCK_H], dtype=tl.float32)
    for _ in range(split * SPLIT_WIDTH, tl.minimum(size, (split + 1) * SPLIT_WIDTH), BLOCK_H):
        within = h < size
        inputs = tl.load(x + h, mask=within, other=0.0).to(tl.float32)
        weights = tl.load(a + h[None, :], mask=(r < rank)[:, None] & within[None, :], other=0.0)
        total += weights.to(tl.float32) * inputs[None, :]
        h += BLOCK_H
    place = ((split.to(tl.int64) * num_rows + n) * num_slices + k) * max_rank
    tl.store(sums + place + r, tl.sum(total, axis=1), mask=r < rank)


@triton.jit(do_not_specialize=["num_segments", "num_rows", "num_slices", "max_rank"])
def _shrink_tile(
    x,  # [T, in]
    a,  # [slots, K, R, in]
    ranks,  # [slots, K] int32
    order,  # [N] int64
    starts,  # [G + 1] int32
    slots,  # [G] int32
    sums,  # [splits, N, K, R] float32
    num_segments,
    num_rows,
    num_slices,
    max_rank,
    size,
    x_stride,
    a_slot_stride,
    a_slice_stride,
    a_rank_stride,
    SEARCH_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    SPLIT_WIDTH: tl.constexpr,
):
    """As `_shrink_row`, for up to BLOCK_M rows of one segment. Grid: tile of rows, (k, r), split."""
    segment, first, end = find_tile(starts, num_segments, tl.program_id(0), SEARCH_WIDTH, BLOCK_M)
    if segment >= num_segments:
        return
    rank_blocks = tl.cdiv(max_rank, BLOCK_R)
    k, first_rank = tl.program_id(1) // rank_blocks, tl.program_id(1) % rank_blocks * BLOCK_R
    slot = tl.load(slots + segment).to(tl.int64)
    rank = tl.load(ranks + slot * num_slices + k)
    if first_rank >= rank:
        return

    split = tl.program_id(2)
    n = first + tl.arange(0, BLOCK_M)
    r = first_rank + tl.arange(0, BLOCK_R)
    h = split * SPLIT_WIDTH + tl.arange(0, BLOCK_H)
    x += tl.load(order + n, mask=n < end, other=0)[:, None] * x_stride
    a += slot * a_slot_stride + k.to(tl.int64) * a_slice_stride + r[:, None].to(tl.int64) * a_rank_stride
    total = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
    for _ in range(split * SPLIT_WIDTH, tl.minimum(size, (split + 1) * SPLIT_WIDTH), BLOCK_H):
        within = (h < size)[None, :]
        inputs = tl.load(x + h[None, :], mask=(n < end)[:, None] & within, other=0.0)
        weights = tl.load(a + h[None, :], mask=(r < rank)[:, None] & within, other=0.0).to(inputs.dtype)
        total = tl.dot(inputs, tl.trans(weights), total, input_precision="ieee")
        h += BLOCK_H
    place = ((split.to(tl.int64) * num_rows + n[:, None]) * num_slices + k) * max_rank
    tl.store(sums + place + r[None, :], total, mask=(n < end)[:, None] & (r < rank)[None, :])


@triton.jit(do_not_specialize=["num_splits"])
def _add_splits(
    sums,  # [splits, count] float32
    shrunk,  # [count] float32
    num_splits,
    count,
    BLOCK: tl.constexpr,
):
    """shrunk[i] = sum of sums[split, i], in the order of splits."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for _ in range(num_splits):
        total += tl.load(sums + i, mask=i < count, other=0.0)
        sums += count
    tl.store(shrunk + i, total, mask=i < count)


def configs() -> Iterator[KernelConfig]:
    """At Llama-3-8B's down_proj."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for form in Form:
            for max_rank in (16,) if form is Form.ROW else (16, 64):
                x, lora, segments = meta_batch(form, max_rank, 14336, [4096], dtype)
                shrunk = torch.empty(len(x), 1, max_rank, device="meta")
                launches = _launches(x, lora, segments, shrunk)
                yield launches[0].config(f"{form.value}-R{max_rank}-{str(dtype).removeprefix('torch.')}")
    yield launches[1].config("add_splits")

"""shrunk @ B of many adapters: `y[order[n], columns of k] += shrunk[n, k, :rank] @ b[slot, :rank, columns of k]`.

All slices and segments in one launch. No two programs write the same number of y, and each sums over ranks in order: a
row has the same bits alone and in any batch of the same `Form`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

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

__all__ = ["configs", "lora_expand_"]


def lora_expand_(shrunk: Tensor, lora: LoraSlots, segments: AdapterSegments, y: Tensor) -> None:
    """`y: [T, out]`: y[order[n], columns of k] += shrunk[n, k, :rank] @ b[slot, :rank, columns of k], in place.

    `shrunk: [N, K, R]` float32, as `lora_shrink` gave it. For tensor cores it is rounded to b's dtype, as PEFT's result
    of A is; sums are float32, and rounded to y's dtype once. Raises ValueError for shapes that don't fit together.
    Captures into a graph.
    """
    check(lora, segments)
    if shrunk.shape != (len(segments.order), *lora.a.shape[1:3]) or not shrunk.is_contiguous():
        raise ValueError(f"shrunk must be [N, K, R] and contiguous, it is {[*shrunk.shape]}")
    if y.shape[1] != lora.out_starts[-1] or y.stride(1) != 1:
        raise ValueError(f"y must be [T, {lora.out_starts[-1]}] and dense along out, it is {[*y.shape]}")
    _launch(shrunk, lora, segments, y).run()


@dataclass(frozen=True, slots=True)
class _Tile:
    """What one program computes."""

    rows: int
    columns: int
    ranks: int  # at a time
    num_warps: int
    num_stages: int


def _tile(form: Form, max_rank: int, dtype: torch.dtype) -> _Tile:
    """The configurations that are used, by the form, the ranks and b's dtype."""
    ranks = 16 if max_rank <= 16 else 32
    if form is Form.ROW:
        return _Tile(rows=1, columns=2048 // ranks, ranks=ranks, num_warps=4, num_stages=1)
    if form is Form.SMALL:
        return _Tile(rows=16, columns=128, ranks=ranks, num_warps=4, num_stages=2)
    if dtype == torch.float32:  # no tensor cores: all of a dot's operands are in registers
        return _Tile(rows=32, columns=64, ranks=16, num_warps=4, num_stages=2)
    # With 128 columns for 4 warps registers are spilt; with 64 each thread takes 218 on sm_80, and few warps fit.
    return _Tile(rows=64, columns=64, ranks=ranks, num_warps=8, num_stages=2)


def _launch(shrunk: Tensor, lora: LoraSlots, segments: AdapterSegments, y: Tensor) -> Launch:
    num_rows, num_slices, max_rank = shrunk.shape
    tile = _tile(Form.of(num_rows), max_rank, lora.b.dtype)
    # Each slice's columns are cut into tiles of their own.
    tiles = [triton.cdiv(end - start, tile.columns) for start, end in pairwise(lora.out_starts)]
    args: dict[str, Argument] = {
        "shrunk": shrunk,
        "b": lora.b,
        "ranks": lora.ranks,
        "order": segments.order,
        "starts": segments.starts,
        "slots": segments.slots,
        "y": y,
        "out_starts": lora.out_starts,
        "tile_starts": (0, *accumulate(tiles)),
        "num_segments": len(segments.slots),
        "max_rank": max_rank,
        "b_slot_stride": lora.b.stride(0),
        "b_rank_stride": lora.b.stride(1),
        "y_stride": y.stride(0),
    }
    constants = {
        "NUM_SLICES": num_slices,
        "SEARCH_WIDTH": search_width(segments),
        "BLOCK_N": tile.columns,
        "BLOCK_R": tile.ranks,
    }
    if tile.rows == 1:
        grid = (num_rows, sum(tiles))
        return Launch(_expand_row, grid, args, constants, tile.num_warps, tile.num_stages)
    constants["BLOCK_M"] = tile.rows
    grid = (max_tiles(segments, tile.rows), sum(tiles))
    return Launch(_expand_tile, grid, args, constants, tile.num_warps, tile.num_stages)


@triton.jit
def _find_columns(tile, out_starts, tile_starts, NUM_SLICES: tl.constexpr, BLOCK_N: tl.constexpr):
    """(slice, first, end): a tile's columns are [first, min(first + BLOCK_N, end))."""
    k, start, end, first_tile = 0, out_starts[0], out_starts[1], tile_starts[0]
    for i in tl.static_range(1, NUM_SLICES):
        reached = tile >= tile_starts[i]
        k = tl.where(reached, i, k)
        start = tl.where(reached, out_starts[i], start)
        end = tl.where(reached, out_starts[i + 1], end)
        first_tile = tl.where(reached, tile_starts[i], first_tile)
    return k, start + (tile - first_tile) * BLOCK_N, end


@triton.jit(do_not_specialize=["num_segments", "max_rank"])
def _expand_row(
    shrunk,  # [N, K, R] float32
    b,  # [slots, R, out]
    ranks,  # [slots, K] int32
    order,  # [N] int64
    starts,  # [G + 1] int32
    slots,  # [G] int32
    y,  # [T, out]
    out_starts,  # K + 1 numbers
    tile_starts,  # K + 1 numbers
    num_segments,
    max_rank,
    b_slot_stride,
    b_rank_stride,
    y_stride,
    NUM_SLICES: tl.constexpr,
    SEARCH_WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """y[order[n], c] += sum of shrunk[n, k, r] * b[slot, r, c] over r, for BLOCK_N columns c of slice k. Grid: n, c."""
    n = tl.program_id(0)
    segment = find_row(starts, num_segments, n, SEARCH_WIDTH)
    if segment >= num_segments:
        return
    k, first_column, end_column = _find_columns(tl.program_id(1), out_starts, tile_starts, NUM_SLICES, BLOCK_N)
    slot = tl.load(slots + segment).to(tl.int64)
    rank = tl.load(ranks + slot * NUM_SLICES + k)
    if rank == 0:
        return

    columns = first_column + tl.arange(0, BLOCK_N)
    within = columns < end_column
    shrunk += (n.to(tl.int64) * NUM_SLICES + k) * max_rank
    b += slot * b_slot_stride + columns[None, :]
    total = tl.zeros([BLOCK_N], dtype=tl.float32)
    for first_rank in range(0, rank, BLOCK_R):
        r = first_rank + tl.arange(0, BLOCK_R)
        factors = tl.load(shrunk + r, mask=r < rank, other=0.0)
        rows = b + r[:, None].to(tl.int64) * b_rank_stride
        weights = tl.load(rows, mask=(r < rank)[:, None] & within[None, :], other=0.0)
        total += tl.sum(factors[:, None] * weights.to(tl.float32), axis=0)
    y += tl.load(order + n) * y_stride + columns
    tl.store(y, (tl.load(y, mask=within, other=0.0).to(tl.float32) + total).to(y.dtype.element_ty), mask=within)


@triton.jit(do_not_specialize=["num_segments", "max_rank"])
def _expand_tile(
    shrunk,  # [N, K, R] float32
    b,  # [slots, R, out]
    ranks,  # [slots, K] int32
    order,  # [N] int64
    starts,  # [G + 1] int32
    slots,  # [G] int32
    y,  # [T, out]
    out_starts,  # K + 1 numbers
    tile_starts,  # K + 1 numbers
    num_segments,
    max_rank,
    b_slot_stride,
    b_rank_stride,
    y_stride,
    NUM_SLICES: tl.constexpr,
    SEARCH_WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """As `_expand_row`, for up to BLOCK_M rows of one segment. Grid: tile of rows, c."""
    segment, first, end = find_tile(starts, num_segments, tl.program_id(0), SEARCH_WIDTH, BLOCK_M)
    if segment >= num_segments:
        return
    k, first_column, end_column = _find_columns(tl.program_id(1), out_starts, tile_starts, NUM_SLICES, BLOCK_N)
    slot = tl.load(slots + segment).to(tl.int64)
    rank = tl.load(ranks + slot * NUM_SLICES + k)
    if rank == 0:
        return

    n = first + tl.arange(0, BLOCK_M)
    columns = first_column + tl.arange(0, BLOCK_N)
    within = (columns < end_column)[None, :]
    shrunk += (n[:, None].to(tl.int64) * NUM_SLICES + k) * max_rank
    b += slot * b_slot_stride + columns[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for first_rank in range(0, rank, BLOCK_R):
        r = first_rank + tl.arange(0, BLOCK_R)
        factors = tl.load(shrunk + r[None, :], mask=(n < end)[:, None] & (r < rank)[None, :], other=0.0)
        rows = b + r[:, None].to(tl.int64) * b_rank_stride
        weights = tl.load(rows, mask=(r < rank)[:, None] & within, other=0.0)
        total = tl.dot(factors.to(weights.dtype), weights, total, input_precision="ieee")
    y += tl.load(order + n, mask=n < end, other=0)[:, None] * y_stride + columns[None, :]
    written = (n < end)[:, None] & within
    tl.store(y, (tl.load(y, mask=written, other=0.0).to(tl.float32) + total).to(y.dtype.element_ty), mask=written)


def configs() -> Iterator[KernelConfig]:
    """At Llama-3-8B's qkv_proj."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for form in Form:
            for max_rank in (16, 64):
                x, lora, segments = meta_batch(form, max_rank, 4096, [4096, 1024, 1024], dtype)
                shrunk, y = torch.empty(len(x), 3, max_rank, device="meta"), x.new_empty(len(x), 6144)
                launch = _launch(shrunk, lora, segments, y)
                yield launch.config(f"{form.value}-R{max_rank}-{str(dtype).removeprefix('torch.')}")

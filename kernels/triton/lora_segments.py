"""How the kernels of adapters find their rows: on the device, so that a grid depends on shapes alone.

A grid is made for the most programs that so many rows in so many segments could need. Each program looks up its own
segment in `AdapterSegments.starts`; those that find none end at once. So a captured graph serves any mix of adapters
that fits its padded shapes, and rows in no segment cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlserve.kernels import AdapterSegments, LoraSlots

__all__ = ["Form", "check", "find_row", "find_tile", "max_tiles", "meta_batch", "search_width"]

MAX_SINGLE_ROWS = 32
MAX_SMALL_ROWS = 1024
_MIN_SEARCH_WIDTH = 64


class Form(Enum):
    """How rows are multiplied. It depends on how many rows of a step have an adapter, and on nothing else."""

    ROW = "row"  # decoding: each by itself, without tensor cores; what two rows both read comes from the L2 cache
    SMALL = "small"  # on tensor cores, in tiles of 16 rows of one segment
    LARGE = "large"  # prefill: in tiles of 64, or 32 in float32

    @classmethod
    def of(cls, num_rows: int) -> Form:
        if num_rows <= MAX_SINGLE_ROWS:
            return cls.ROW
        return cls.SMALL if num_rows <= MAX_SMALL_ROWS else cls.LARGE


def search_width(segments: AdapterSegments) -> int:
    """Segments that a program looks at in one go: all. Few different widths, so that few forms are compiled."""
    return max(_MIN_SEARCH_WIDTH, 1 << (len(segments.slots) - 1).bit_length())


def max_tiles(segments: AdapterSegments, rows_per_tile: int) -> int:
    """The most tiles that the segments can fill: each ends with one that may hold a single row."""
    num_rows, num_segments = len(segments.order), len(segments.slots)
    return min(num_rows, (num_rows + num_segments * (rows_per_tile - 1)) // rows_per_tile)


def check(lora: LoraSlots, segments: AdapterSegments) -> None:
    """Shapes and layouts. The contents of segments and ranks stay on the device, and are trusted."""
    if lora.a.stride(-1) != 1 or lora.b.stride(-1) != 1:
        raise ValueError("a must be dense along in, b along out")
    num_slices = len(lora.out_starts) - 1
    if lora.ranks.shape != (lora.a.shape[0], num_slices) or not lora.ranks.is_contiguous():
        raise ValueError(f"ranks must be [slots, slices] and contiguous, they are {[*lora.ranks.shape]}")
    if lora.ranks.device != lora.a.device:
        raise ValueError(f"ranks are on {lora.ranks.device}, a is on {lora.a.device}: keep them together")
    if len(segments.starts) != len(segments.slots) + 1:
        raise ValueError(f"{len(segments.slots)} slots have {len(segments.starts)} starts: must be one more than slots")


def meta_batch(
    form: Form, max_rank: int, size: int, out: Sequence[int], dtype: torch.dtype
) -> tuple[Tensor, LoraSlots, AdapterSegments]:
    """x and one layer's slots on the `meta` device: what a launch of that form is compiled for."""
    num_rows = {Form.ROW: MAX_SINGLE_ROWS, Form.SMALL: MAX_SMALL_ROWS, Form.LARGE: 8 * MAX_SMALL_ROWS}[form]

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    num_slots, num_layers, num_slices = 64, 32, len(out)
    a = empty(num_slots, max_rank, num_layers, num_slices, size)[:, :, 0].transpose(1, 2)
    b = empty(num_slots, max_rank, num_layers, sum(out))[:, :, 0]
    ranks, starts = empty(num_slots, num_slices, dtype=torch.int32), empty(num_slots + 1, dtype=torch.int32)
    segments = AdapterSegments(empty(num_rows, dtype=torch.int64), starts, starts[1:])
    return empty(num_rows, size), LoraSlots(a, b, ranks, (0, *accumulate(out))), segments


@triton.jit
def find_row(starts, num_segments, row, WIDTH: tl.constexpr):
    """The segment of order[row]; `num_segments` if it is in none."""
    g = tl.arange(0, WIDTH)
    ends = tl.load(starts + 1 + g, mask=g < num_segments, other=2**31 - 1)
    return tl.sum((ends <= row).to(tl.int32), axis=0)  # how many end before it


@triton.jit
def find_tile(starts, num_segments, tile, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr):
    """(segment, first, end): the tile holds order[first : min(first + BLOCK_M, end)].

    Tiles are counted through all segments. One beyond the last has `num_segments` or more for its segment.
    """
    g = tl.arange(0, WIDTH)
    used = g < num_segments
    lengths = tl.load(starts + 1 + g, mask=used, other=0) - tl.load(starts + g, mask=used, other=0)
    tiles = (lengths + BLOCK_M - 1) // BLOCK_M
    before = tl.cumsum(tiles, axis=0) <= tile  # segments that end before the tile, and padding after the last tile
    segment = tl.sum(before.to(tl.int32), axis=0)
    tile_in_segment = tile - tl.sum(tl.where(before, tiles, 0), axis=0)
    exists = segment < num_segments
    first = tl.load(starts + segment, mask=exists, other=0) + tile_in_segment * BLOCK_M
    return segment, first, tl.load(starts + segment + 1, mask=exists, other=0)

"""What the attention kernels share: their arguments, which tile is whose, where keys are kept, and online softmax."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from mlserve.kernels import PagedBatch
from mlserve.kernels.triton.kv_cache import cache_strides

__all__ = [
    "KeyHead",
    "Softmax",
    "attend_keys",
    "empty_softmax",
    "find_sequence",
    "find_split",
    "load_rows",
    "score_args",
    "sequence_args",
    "stride_args",
]

LOG2_E = tl.constexpr(1.4426950408889634)
SEARCH_WIDTH = tl.constexpr(256)  # sequences looked at with one load


class KeyHead(NamedTuple):
    """One key/value head of one sequence, as a kernel sees it."""

    key_pointer: Any  # to the head's first key and value in block 0
    value_pointer: Any
    block_table: Any  # pointer to the sequence's first block number
    stride_block: Any  # elements from a block to the next, and from a token's slot to the next
    stride_slot: Any


class Softmax(NamedTuple):
    """State of an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022), one per row."""

    peak: Any  # [M]: the highest score so far, times log2(e)
    total: Any  # [M]: sum of 2^(score - peak)
    acc: Any  # [M, D]: the same sum, each term times its value


def sequence_args(batch: PagedBatch) -> dict[str, Tensor]:
    return {
        "query_starts": batch.query_starts,
        "context_lens": batch.context_lens,
        "block_table": batch.block_table,
        "block_starts": batch.block_starts,
    }


def score_args(scale: float, window: int | None, soft_cap: float | None) -> dict[str, float | None]:
    return {"scale": scale, "window": window, "soft_cap": soft_cap}


def stride_args(q: Tensor, kv: Tensor) -> dict[str, int]:
    """Of `q: [T, Hq, D]` and `kv`, in elements; both are dense in D."""
    return {"stride_q_token": q.stride(0), "stride_q_head": q.stride(1), **cache_strides(kv)}


@triton.jit
def find_sequence(query_starts, num_sequences, tile, TILE_QUERIES: tl.constexpr):
    """The sequence that tile number `tile` belongs to, and the number of its first tile.

    Sequence s owns the tiles from `query_starts[s] // TILE_QUERIES + s` on. That leaves room for its last, partly
    filled tile whatever the other sequences' lengths, so that no sum over sequences is needed; some tiles stay empty.
    """
    count = 0  # sequences whose first tile is this one or an earlier one
    for begin in range(0, num_sequences, SEARCH_WIDTH):
        index = begin + tl.arange(0, SEARCH_WIDTH)
        starts = tl.load(query_starts + index, mask=index < num_sequences, other=0)
        count += tl.sum(((starts // TILE_QUERIES + index <= tile) & (index < num_sequences)).to(tl.int32))
    sequence = count - 1
    return sequence, tl.load(query_starts + sequence) // TILE_QUERIES + sequence


@triton.jit
def find_split(block_start, sequence, split, BLOCK_SIZE: tl.constexpr, SPLIT: tl.constexpr):
    """Where the result of a split of a sequence is kept. int64. `block_start` is where its block table starts.

    The layout is that of `find_sequence`: as many splits as its blocks can need, found without a sum.
    """
    return block_start.to(tl.int64) * BLOCK_SIZE // SPLIT + sequence + split


@triton.jit
def load_rows(pointer, offsets, valid, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """`[len(offsets), BLOCK_D]`: HEAD_DIM elements at each offset, zeros beyond them and in rows that aren't `valid`.

    Rows that aren't valid are never read: they may hold NaN, and 0 * NaN would pass through a product.
    `valid` None: all rows are.
    """
    dims = tl.arange(0, BLOCK_D)
    at = pointer + offsets[:, None] + dims[None, :]
    inside = (dims < HEAD_DIM)[None, :]
    if valid is not None:
        return tl.load(at, mask=valid[:, None] & inside, other=0.0)
    if BLOCK_D == HEAD_DIM:
        return tl.load(at)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def empty_softmax(ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """The state before any key."""
    return Softmax(
        tl.full([ROWS], float("-inf"), tl.float32),
        tl.zeros([ROWS], tl.float32),
        tl.zeros([ROWS, BLOCK_D], tl.float32),
    )


@triton.jit
def attend_keys(
    q, head, state, first, end, visible_begins, visible_ends, scale, soft_cap,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attend to the keys at positions [first, end) in steps of BLOCK_N.

    `q: [M, BLOCK_D]`. Row r sees the positions [visible_begins[r], visible_ends[r]) only; `visible_begins` None: all
    from 0 on. Not MASKED: every row sees all of them, and their number is a multiple of BLOCK_N.
    """
    for begin in range(first, end, BLOCK_N):
        positions = begin + tl.arange(0, BLOCK_N)
        valid = None
        visible = None
        if MASKED:
            valid = positions < end
            visible = positions[None, :] < tl.minimum(visible_ends, end)[:, None]
            if visible_begins is not None:
                visible &= positions[None, :] >= visible_begins[:, None]
        block = tl.load(head.block_table + positions // BLOCK_SIZE, mask=valid, other=None if valid is None else 0)
        offsets = block.to(tl.int64) * head.stride_block + positions % BLOCK_SIZE * head.stride_slot
        k = load_rows(head.key_pointer, offsets, valid, HEAD_DIM, q.shape[1])
        v = load_rows(head.value_pointer, offsets, valid, HEAD_DIM, q.shape[1])
        state = _attend_tile(q, k, v, visible, state, scale, soft_cap)
    return state


@triton.jit
def _attend_tile(q, k, v, visible, state, scale, soft_cap):
    """`q: [M, D]`, `k, v: [N, D]`, `visible: [M, N]` or None for all. Products are in q's type, sums in float32."""
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")  # [M, N]
    if soft_cap is None:
        scores *= scale * LOG2_E
    else:  # c * tanh(x / c) = c - 2c / (e^(2x / c) + 1): where the power overflows, c is right
        powers = tl.exp2(scores * (scale * 2 * LOG2_E / soft_cap))
        scores = (soft_cap - 2 * soft_cap / (powers + 1)) * LOG2_E
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    peak = tl.maximum(state.peak, tl.max(scores, 1))
    pivot = peak
    if visible is not None:  # a row that has seen no key yet: -inf - -inf would be NaN
        pivot = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp2(scores - pivot[:, None])
    decay = tl.exp2(state.peak - pivot)
    acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), state.acc * decay[:, None], input_precision="ieee")
    return Softmax(peak, state.total * decay + tl.sum(weights, 1), acc)

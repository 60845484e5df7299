"""Drawing tokens: temperature, top-k, top-p and min-p without a sort, then the inverse of the cumulative distribution.

The rule is that of `mlserve.model.sampler`, which does the same with torch on a CPU. Four launches, each over all rows
and with the settings of rows read on the device:

1. `_weights_kernel`: logits become weights relative to the likeliest token's, in place.
2. `_cut_kernel`: the least weight that a row may still draw. Weights aren't negative, so their bits are ordered as they
   are: the search is for the largest number with which enough tokens (top-k) or enough weight (top-p) are left, by
   passes over the row that each leave a quarter of the interval (three pivots), cut to the weights that there are in
   it: FlashInfer's idea (Ye et al. 2025), on bits. Of 128,256 normal logits that takes 5 to 7 passes if they are of
   bfloat16, which has few distinct values, and 5 to 13 if of float32. Rows without top-k and top-p are not read.
3. `_sums_kernel`: sums of blocks of 256 tokens, of what is left.
4. `_pick_kernel`: the block, and the token in it.

A row's token depends on that row alone: sums run in one order, whatever the batch. It is the CPU's token but where the
two round weights or float32 sums otherwise, some 1e-6 of the total: if the drawn number is that close to a token's edge
in the cumulative distribution, or the weight up to a token that close to top_p.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlserve.kernels.triton.configs import Argument, KernelConfig, Launch

__all__ = ["BLOCK", "configs", "draw"]

BLOCK = 256  # tokens whose weights are summed first, as on a CPU
TILE = 4096  # tokens that a program takes at once; whole blocks
# Weights below 1e-34 of the likeliest token's count as 0, as on a CPU.
LEAST_WEIGHT, LEAST_EXPONENT = tl.constexpr(1e-34), tl.constexpr(-80.0)
ONE = tl.constexpr(0x3F800000)  # the bits of 1.0, the largest weight
NOWHERE = tl.constexpr(2**31 - 1)


def draw(
    logits: Tensor, best: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> Tensor:
    """Draw one token for each row: `[n]` int64. Overwrites `logits: [n, V]` float32, which must be dense.

    best: `[n]` float32, each row's largest logit. temperature: `[n]` float32, above 0. top_k: `[n]` int32, 1 to V; V
    doesn't restrict. top_p: `[n]` float64, in (0, 1]. min_p: `[n]` float32, in [0, 1]. uniform: `[n]` float64, in
    [0, 1). Nothing is read back from the device. A row without a finite `best` gets some token of the vocabulary.

    Raises ValueError for logits of another type, or not dense.
    """
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError(f"logits must be dense float32, they are {logits.dtype} of strides {logits.stride()}")
    drawn = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for launch in _launches(logits, best, temperature, top_k, top_p, min_p, uniform, drawn):
        launch.run()
    return drawn


def _launches(
    logits: Tensor,
    best: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    drawn: Tensor,
) -> list[Launch]:
    num_rows, width = logits.shape
    num_blocks = triton.cdiv(width, BLOCK)
    least = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    sums = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=logits.device)
    rows, tiles = (num_rows,), (num_rows, triton.cdiv(width, TILE))
    row: dict[str, Argument] = {"weights": logits, "width": width}
    restrictions = {"top_k": top_k, "top_p": _bits(top_p), "min_p": min_p}
    picked = {"sums": sums, "uniform": _bits(uniform), "drawn": drawn}
    blocks = {"BLOCK": BLOCK, "NUM_BLOCKS": num_blocks, "BLOCK_SUMS": triton.next_power_of_2(num_blocks)}
    return [
        Launch(_weights_kernel, tiles, {**row, "best": best, "temperature": temperature}, {"TILE": TILE}),
        Launch(_cut_kernel, rows, {**row, **restrictions, "least": least}, {"TILE": TILE}, num_warps=16),
        Launch(
            _sums_kernel,
            tiles,
            {**row, "least": least, "sums": sums},
            {"BLOCK": BLOCK, "NUM_BLOCKS": num_blocks, "TILE_BLOCKS": TILE // BLOCK},
        ),
        Launch(_pick_kernel, rows, {**row, "least": least, **picked}, blocks),
    ]


def _bits(x: Tensor) -> Tensor:
    """float64 as int64, which is how it is handed to kernels."""
    return x.view(torch.int64)


@triton.jit
def _weights_kernel(
    weights,  # [n, V]: logits before, weights afterwards
    best,  # [n]
    temperature,  # [n]
    width,
    TILE: tl.constexpr,
):  # fmt: skip
    """A tile of one row. Where the best logit isn't finite all weights are 0."""
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * TILE + tl.arange(0, TILE)
    at = weights + row * width + tokens
    logits = tl.load(at, mask=tokens < width)
    exponents = tl.div_rn(logits - tl.load(best + row), tl.load(temperature + row))
    powers = tl.exp(tl.maximum(exponents, LEAST_EXPONENT))
    tl.store(at, tl.where(powers > LEAST_WEIGHT, powers, 0.0), mask=tokens < width)


@triton.jit
def _search(weights, width, low, target, COUNTED: tl.constexpr, TILE: tl.constexpr):
    """The bits of a row's largest weight with which the tokens not below it reach the target: in number if COUNTED,
    otherwise in weight. Taken for granted of `low`.

    Invariant: `low` reaches the target and `high` doesn't.
    """
    high = ONE + 1
    while high - low > 1:
        step = (high - low + 3) // 4
        first, second, third = low + step, low + 2 * step, low + 3 * step
        above_first = tl.zeros([TILE], tl.int32 if COUNTED else tl.float32)
        above_second, above_third = above_first, above_first
        smallest = tl.full([TILE], NOWHERE, tl.int32)  # of the weights within the interval
        largest = tl.full([TILE], -1, tl.int32)
        for begin in range(0, width, TILE):
            tokens = begin + tl.arange(0, TILE)
            weight = tl.load(weights + tokens, mask=tokens < width, other=-1.0)  # no weight: below all of them
            bits = weight.to(tl.int32, bitcast=True)
            amount = 1 if COUNTED else weight
            above_first += tl.where(bits >= first, amount, 0)
            above_second += tl.where(bits >= second, amount, 0)
            above_third += tl.where(bits >= third, amount, 0)
            within = (bits >= low) & (bits < high)
            smallest = tl.minimum(smallest, tl.where(within, bits, NOWHERE))
            largest = tl.maximum(largest, tl.where(within, bits, -1))
        reaches_first = tl.sum(above_first.to(tl.float64)) >= target
        reaches_second = tl.sum(above_second.to(tl.float64)) >= target
        reaches_third = tl.sum(above_third.to(tl.float64)) >= target
        below = tl.where(reaches_second, third, tl.where(reaches_first, second, first))
        low = tl.where(reaches_third, third, tl.where(reaches_second, second, tl.where(reaches_first, first, low)))
        high = tl.minimum(high, tl.where(reaches_third, high, below))
        low = tl.maximum(low, tl.min(smallest))
        high = tl.minimum(high, tl.max(largest) + 1)
    return low


@triton.jit
def _mass(weights, width, k, kth, TILE: tl.constexpr):
    """The weight of a row's k likeliest tokens, float64. `kth`: the bits of the last of them, or 0 for all tokens."""
    above = tl.zeros([TILE], tl.float32)
    count = tl.zeros([TILE], tl.int32)
    for begin in range(0, width, TILE):
        tokens = begin + tl.arange(0, TILE)
        weight = tl.load(weights + tokens, mask=tokens < width, other=0.0)
        is_above = weight.to(tl.int32, bitcast=True) > kth
        above += tl.where(is_above, weight, 0.0)
        count += is_above.to(tl.int32)
    equal = (k - tl.sum(count)).to(tl.float64) * kth.to(tl.float32, bitcast=True).to(tl.float64)
    return tl.sum(above.to(tl.float64)) + equal


@triton.jit
def _cut_kernel(
    weights,  # [n, V]
    top_k,  # [n] int32
    top_p,  # [n], bits of float64
    min_p,  # [n]
    least,  # [n]: set here
    width,
    TILE: tl.constexpr,
):  # fmt: skip
    """One row: top_k, then top_p of what top_k left, and min_p."""
    row = tl.program_id(0).to(tl.int64)
    weights += row * width
    k = tl.load(top_k + row)
    p = tl.load(top_p + row).to(tl.float64, bitcast=True)
    cut = tl.zeros((), tl.int32)
    if k < width:
        cut = _search(weights, width, cut, k.to(tl.float64), True, TILE)
    if p < 1:
        cut = _search(weights, width, cut, p * _mass(weights, width, k, cut, TILE), False, TILE)
    tl.store(least + row, tl.maximum(cut.to(tl.float32, bitcast=True), tl.load(min_p + row)))


@triton.jit
def _sums_kernel(
    weights,  # [n, V]
    least,  # [n]
    sums,  # [n, NUM_BLOCKS]: set here
    width,
    BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr, TILE_BLOCKS: tl.constexpr,
):  # fmt: skip
    """The sums of some blocks of one row."""
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1) * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)
    tokens = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weights + row * width + tokens, mask=tokens < width, other=0.0)
    left = tl.where(weight >= tl.load(least + row), weight, 0.0)
    tl.store(sums + row * NUM_BLOCKS + blocks, tl.sum(left, 1), mask=blocks < NUM_BLOCKS)


@triton.jit
def _invert(weights, places, target):
    """The first place whose cumulative weight exceeds the target, and the weight before it. float64.

    Places without weight are never taken. If rounding keeps all from exceeding the target, it is the last with weight.
    """
    cdf = tl.cumsum(weights, 0)
    place = tl.min(tl.where((cdf > target) & (weights > 0), places, NOWHERE))
    place = tl.where(place == NOWHERE, tl.max(tl.where(weights > 0, places, 0)), place)
    return place, tl.sum(tl.where(places == place - 1, cdf, 0.0))


@triton.jit
def _pick_kernel(
    weights,  # [n, V]
    least,  # [n]
    sums,  # [n, NUM_BLOCKS]
    uniform,  # [n], bits of float64
    drawn,  # [n] int64: set here
    width,
    BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr, BLOCK_SUMS: tl.constexpr,
):  # fmt: skip
    """One row: where the cumulative weight, in order of token ids, exceeds uniform * total."""
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, BLOCK_SUMS)
    block_weights = tl.load(sums + row * NUM_BLOCKS + blocks, mask=blocks < NUM_BLOCKS, other=0.0).to(tl.float64)
    target = tl.load(uniform + row).to(tl.float64, bitcast=True) * tl.sum(block_weights)
    block, before = _invert(block_weights, blocks, target)
    places = tl.arange(0, BLOCK)
    tokens = block * BLOCK + places
    weight = tl.load(weights + row * width + tokens, mask=tokens < width, other=0.0)
    left = tl.where(weight >= tl.load(least + row), weight, 0.0)
    token, _ = _invert(left.to(tl.float64), places, target - before)
    tl.store(drawn + row, (block * BLOCK + token).to(tl.int64))


def configs() -> Iterator[KernelConfig]:
    """The vocabularies of Llama 3 and Gemma 3."""
    meta = torch.device("meta")
    for width in (128256, 262144):
        logits, per_row = torch.empty(64, width, device=meta), torch.empty(64, device=meta)
        top_k, double = per_row.to(torch.int32), per_row.double()
        drawn = double.long()
        launches = _launches(logits, per_row, per_row, top_k, double, per_row, double, drawn)
        for name, launch in zip(("weights", "cut", "sums", "pick"), launches, strict=True):
            yield launch.config(f"{name}-V{width}")

"""Root mean square norm (Zhang and Sennrich 2019), alone and together with adding to the residual stream."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlserve.kernels.triton.configs import Argument, KernelConfig, Launch

__all__ = ["add_rms_norm", "configs", "rms_norm"]

MAX_WIDTH = 16384  # a program holds whole rows in registers: twice as much would spill them
PROGRAM_ELEMENTS = 2048  # of short rows, that one program takes together
THREAD_ELEMENTS = 16  # as far as there are warps: 32 from 8192 elements on


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `mlserve.kernels.Ops.rms_norm`. Up to three dimensions are read in place, whatever their strides.

    Raises ValueError for rows of more than 16,384 elements, or not dense along the last dimension.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm_launch(x, weight, out, eps).run()
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `mlserve.kernels.Ops.add_rms_norm`. The sum is rounded to the residual's type, and normed as it is kept.

    Raises ValueError as `rms_norm` does.
    """
    out = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    _add_norm_launch(x, residual, weight, out, eps).run()
    return out


def _norm_launch(x: Tensor, weight: Tensor, out: Tensor, eps: float) -> Launch:
    _check(x)
    x = _in_three_dimensions(x)
    outer, inner, width = x.shape
    tile, num_warps = _tile(width)
    args: dict[str, Argument] = {"x_pointer": x, "weight_pointer": weight, "out_pointer": out, "eps": eps}
    args |= {"num_rows": outer * inner, "stride_outer": x.stride(0), "stride_inner": x.stride(1)}
    grid = (triton.cdiv(outer * inner, tile["BLOCK_ROWS"]),)
    return Launch(_norm_kernel, grid, args, {"INNER": inner, "WIDTH": width, **tile}, num_warps)


def _add_norm_launch(x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, eps: float) -> Launch:
    _check(x)
    _check(residual)
    num_rows, width = residual.shape
    tile, num_warps = _tile(width)
    args: dict[str, Argument] = {"x_pointer": x, "residual_pointer": residual, "weight_pointer": weight}
    args |= {"out_pointer": out, "num_rows": num_rows, "eps": eps}
    args |= {"stride_x": x.stride(0), "stride_residual": residual.stride(0)}
    grid = (triton.cdiv(num_rows, tile["BLOCK_ROWS"]),)
    return Launch(_add_norm_kernel, grid, args, {"WIDTH": width, **tile}, num_warps)


def _in_three_dimensions(x: Tensor) -> Tensor:
    match x.dim():
        case 1:
            return x[None, None]
        case 2:
            return x[:, None]
        case 3:
            return x
    return x.flatten(0, -3)  # a copy, if strides leave no other way


def _check(x: Tensor) -> None:
    if x.shape[-1] > MAX_WIDTH:
        raise ValueError(f"rows have {x.shape[-1]} elements, the kernel takes up to {MAX_WIDTH}")
    if x.stride(-1) != 1:
        raise ValueError(f"rows must be dense, their elements are {x.stride(-1)} apart")


def _tile(width: int) -> tuple[dict[str, int], int]:
    """What one program takes, and its warps."""
    block_n = triton.next_power_of_2(width)
    block_rows = max(1, PROGRAM_ELEMENTS // block_n)
    num_warps = min(16, max(4, block_rows * block_n // (32 * THREAD_ELEMENTS)))
    return {"BLOCK_ROWS": block_rows, "BLOCK_N": block_n}, num_warps


@triton.jit
def _normed(x, weight, eps, WIDTH: tl.constexpr):
    """`x: [ROWS, N]` float32, zeros beyond WIDTH; `weight: [N]`."""
    mean_square = tl.sum(x * x, 1) / WIDTH
    return x * tl.rsqrt(mean_square + eps)[:, None] * weight[None, :]


@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(
    x_pointer,  # [outer, INNER, WIDTH]
    weight_pointer,  # [WIDTH]
    out_pointer,  # [outer, INNER, WIDTH], dense
    num_rows, eps, stride_outer, stride_inner,
    INNER: tl.constexpr, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """BLOCK_ROWS rows, counted over both leading dimensions."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_N)
    inside = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    weight = tl.load(weight_pointer + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    at = rows // INNER * stride_outer + rows % INNER * stride_inner
    x = tl.load(x_pointer + at[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    y = _normed(x, weight, eps, WIDTH)
    tl.store(out_pointer + rows[:, None] * WIDTH + columns[None, :], y.to(out_pointer.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _add_norm_kernel(
    x_pointer,  # [T, WIDTH]
    residual_pointer,  # [T, WIDTH]
    weight_pointer,  # [WIDTH]
    out_pointer,  # [T, WIDTH], dense
    num_rows, eps, stride_x, stride_residual,
    WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """BLOCK_ROWS rows."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_N)
    inside = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    weight = tl.load(weight_pointer + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    x = tl.load(x_pointer + rows[:, None] * stride_x + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    residual_at = residual_pointer + rows[:, None] * stride_residual + columns[None, :]
    residual = tl.load(residual_at, mask=inside, other=0.0).to(tl.float32)
    total = (residual + x).to(residual_pointer.dtype.element_ty)
    tl.store(residual_at, total, mask=inside)
    y = _normed(total.to(tl.float32), weight, eps, WIDTH)
    tl.store(out_pointer + rows[:, None] * WIDTH + columns[None, :], y.to(out_pointer.dtype.element_ty), mask=inside)


def configs() -> Iterator[KernelConfig]:
    """Hidden sizes from 2,048 to the widest; q of 32 heads within a fused qkv matrix."""
    for width in (2048, 4096, 5120, 8192, MAX_WIDTH):
        yield from _row_forms(width, torch.bfloat16, "bf16")
    for head_dim in (80, 128, 256):
        yield _head_form(head_dim, torch.bfloat16, "bf16")
    for dtype, name in ((torch.float16, "fp16"), (torch.float32, "fp32")):
        for width in (4096, MAX_WIDTH):
            yield from _row_forms(width, dtype, name)
        yield _head_form(128, dtype, name)


def _row_forms(width: int, dtype: torch.dtype, name: str) -> Iterator[KernelConfig]:
    x, weight = torch.empty(64, width, dtype=dtype, device="meta"), torch.empty(width, device="meta")
    yield _norm_launch(x, weight, x, 1e-5).config(f"rms_norm-N{width}-{name}")
    yield _add_norm_launch(x, x, weight, x, 1e-5).config(f"add_rms_norm-N{width}-{name}")


def _head_form(head_dim: int, dtype: torch.dtype, name: str) -> KernelConfig:
    q = torch.empty(64, 48, head_dim, dtype=dtype, device="meta")[:, :32]
    weight = torch.empty(head_dim, device="meta")
    return _norm_launch(q, weight, torch.empty_like(q), 1e-6).config(f"rms_norm-D{head_dim}-{name}")

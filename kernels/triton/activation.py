"""Activations of gated MLPs: SwiGLU and GeGLU (Shazeer 2020)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlserve.kernels import Activation
from mlserve.kernels.triton.configs import Argument, KernelConfig, Launch

__all__ = ["configs", "gated_activation"]

PROGRAM_COLUMNS = 1024  # 8 a thread: loads of 16 bytes at 16 bits
GELU_SLOPE = tl.constexpr(1.5957691216057308)  # 2 * sqrt(2 / pi)
GELU_CUBIC = tl.constexpr(0.044715)


def gated_activation(gate_up: Tensor, activation: Activation) -> Tensor:
    """See `mlserve.kernels.Ops.gated_activation`. Computed in float32 and rounded once.

    Raises ValueError for rows that aren't dense.
    """
    if gate_up.stride(1) != 1:
        raise ValueError(f"rows must be dense, their elements are {gate_up.stride(1)} apart")
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    _launch(gate_up, out, activation).run()
    return out


def _launch(gate_up: Tensor, out: Tensor, activation: Activation) -> Launch:
    num_tokens, width = out.shape
    args: dict[str, Argument] = {"gate_up": gate_up, "out": out, "stride_gate_up": gate_up.stride(0)}
    constants = {"WIDTH": width, "GELU": activation is Activation.GELU_TANH, "BLOCK": PROGRAM_COLUMNS}
    return Launch(_gated_kernel, (num_tokens, triton.cdiv(width, PROGRAM_COLUMNS)), args, constants)


@triton.jit
def _gated_kernel(
    gate_up,  # [T, 2 * WIDTH]
    out,  # [T, WIDTH], dense
    stride_gate_up,
    WIDTH: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some columns of one token. Both activations are gate * sigmoid(z), with tanh(z / 2) = 2 * sigmoid(z) - 1."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    row = gate_up + token * stride_gate_up
    gate = tl.load(row + columns, mask=inside).to(tl.float32)
    up = tl.load(row + WIDTH + columns, mask=inside).to(tl.float32)
    z = gate
    if GELU:
        z = GELU_SLOPE * (gate + GELU_CUBIC * gate * gate * gate)
    y = gate / (1 + tl.exp(-z)) * up  # where the power overflows, 0 is right
    tl.store(out + token * WIDTH + columns, y.to(out.dtype.element_ty), mask=inside)


def configs() -> Iterator[KernelConfig]:
    meta = torch.device("meta")
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32")):
        gate_up = torch.empty(64, 2 * 14336, dtype=dtype, device=meta)
        for activation in Activation:
            yield _launch(gate_up, gate_up[:, :14336], activation).config(f"{activation}-I14336-{name}")

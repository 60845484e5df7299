"""Norms and activations in Triton against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tolerances import ELEMENTWISE, TRITON, assert_close

from mlserve.kernels import Activation
from mlserve.kernels.reference import ReferenceOps
from mlserve.kernels.triton.activation import gated_activation
from mlserve.kernels.triton.norm import add_rms_norm, rms_norm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
REFERENCE = ReferenceOps()
# Where a power overflows the kernel means it; numpy, which the interpreter computes with, warns.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def at_size(*sizes: int) -> Any:
    """Sizes of a real step, too large for the interpreter."""
    return pytest.param(*sizes, marks=pytest.mark.gpu)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return ELEMENTWISE if dtype == torch.float32 else TRITON[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        *[(0, 64), (1, 1), (7, 75), (3, 4096), (2, 5000), (1, 16000), (64,), (2, 3, 5, 80), (133, 16)],
        *[pytest.param(shape, marks=pytest.mark.gpu) for shape in ((8192, 4096), (2048, 16384), (1000, 7168))],
    ],
    ids=str,
)
def test_rms_norm(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = (torch.randn(shape) * 3).to(device, dtype), torch.randn(shape[-1], device=device)
    normed = rms_norm(x, weight, 1e-5)
    assert normed.dtype == dtype
    assert_close(normed, REFERENCE.rms_norm(x, weight, 1e-5), tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim"),
    [(5, 3, 80), (1, 32, 128), (33, 2, 16), (2, 1, 256), at_size(8192, 32, 128), at_size(3000, 8, 256)],
    ids=str,
)
def test_heads_are_read_within_qkv(
    device: torch.device, tokens: int, heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    """All else in the matrix is NaN."""
    qkv = torch.full((tokens, heads + 5, head_dim), torch.nan, dtype=dtype, device=device)
    q = qkv[:, 2 : 2 + heads]
    q.copy_(torch.randn(q.shape))
    weight = torch.randn(head_dim, device=device)
    normed = rms_norm(q, weight, 1e-6)
    assert normed.is_contiguous()
    assert_close(normed, REFERENCE.rms_norm(q, weight, 1e-6), tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "width"),
    [(0, 64), (1, 4096), (7, 75), (133, 16), (2, 5000), at_size(8192, 4096), at_size(2048, 16384)],
    ids=str,
)
def test_add_rms_norm(device: torch.device, tokens: int, width: int, dtype: torch.dtype) -> None:
    wide = torch.randn(tokens, 2 * width).to(device, dtype)  # rows of x and of the residual are parts of wider ones
    x, residual, weight = wide[:, :width], wide[:, width:], torch.randn(width, device=device)
    before, expected_residual = x.clone(), residual.clone()
    expected = REFERENCE.add_rms_norm(x, expected_residual, weight, 1e-5)
    assert_close(add_rms_norm(x, residual, weight, 1e-5), expected, tolerance(dtype))
    assert torch.equal(residual, expected_residual)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("x", "message"),
    [(torch.ones(1, 16385), "16385 elements, the kernel takes up to 16384"), (torch.ones(4, 3).T, "3 apart")],
    ids=["wide", "transposed"],
)
def test_rows_that_the_norm_refuses(x: torch.Tensor, message: str) -> None:
    weight = torch.ones(x.shape[-1])
    with pytest.raises(ValueError, match=message):
        rms_norm(x, weight, 1e-5)
    with pytest.raises(ValueError, match=message):
        add_rms_norm(x, torch.ones(x.shape), weight, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize(
    ("tokens", "width"), [(0, 8), (1, 1), (7, 13), (3, 1536), at_size(8192, 14336), at_size(1, 28672)], ids=str
)
def test_gated_activation(
    device: torch.device, tokens: int, width: int, activation: Activation, dtype: torch.dtype
) -> None:
    gate_up = (torch.randn(tokens, 2 * width + 3) * 5).to(device, dtype)[:, 3:]  # rows of a wider matrix
    expected = REFERENCE.gated_activation(gate_up.double(), activation).to(dtype)
    activated = gated_activation(gate_up, activation)
    assert activated.dtype == dtype
    assert_close(activated, expected, tolerance(dtype))


@pytest.mark.parametrize("activation", Activation)
def test_gated_activation_at_the_ends(device: torch.device, activation: Activation) -> None:
    gate = torch.tensor([-1e30, -200.0, -88.5, -87.0, -20.0, -1e-30, 0.0, 1e-30, 20.0, 88.5, 200.0, 1e30, torch.nan])
    gate_up = torch.cat([gate, torch.ones_like(gate)])[None].to(device)
    expected = REFERENCE.gated_activation(gate_up.double(), activation).float()
    activated = gated_activation(gate_up, activation)
    torch.testing.assert_close(activated, expected, **ELEMENTWISE, equal_nan=True)


def test_the_gate_must_be_dense() -> None:
    with pytest.raises(ValueError, match="4 apart"):
        gated_activation(torch.ones(6, 4).T, Activation.SILU)

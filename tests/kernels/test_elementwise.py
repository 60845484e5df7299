"""Native norms, rotary embedding, activations and KV writes against the reference."""

from __future__ import annotations

import pytest
import torch
from tolerances import ELEMENTWISE, assert_close

from mlserve.kernels import Activation
from mlserve.kernels.cpu.ops import CpuOps
from mlserve.kernels.reference import ReferenceOps

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOKENS = [0, 1, 7, 133]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("width", [1, 7, 16, 75, 576])
def test_rms_norm(native: CpuOps, reference: ReferenceOps, tokens: int, width: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(tokens, width) * 3, torch.randn(width).to(dtype)
    assert_close(native.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), ELEMENTWISE)


def test_rms_norm_of_heads_in_a_wider_matrix(native: CpuOps, reference: ReferenceOps) -> None:
    q, weight = torch.randn(7, 6, 16)[:, :4], torch.randn(16)
    normed = native.rms_norm(q, weight, 1e-6)
    assert normed.shape == (7, 4, 16)
    assert_close(normed, reference.rms_norm(q, weight, 1e-6), ELEMENTWISE)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("width", [7, 576])
def test_add_rms_norm(native: CpuOps, reference: ReferenceOps, tokens: int, width: int) -> None:
    x, residual, weight = torch.randn(tokens, width), torch.randn(tokens, width), torch.randn(width)
    expected_residual = residual.clone()
    expected = reference.add_rms_norm(x, expected_residual, weight, 1e-5)
    assert_close(native.add_rms_norm(x, residual, weight, 1e-5), expected, ELEMENTWISE)
    assert torch.equal(residual, expected_residual)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("head_dim", "rotated"), [(64, 64), (80, 80), (80, 32), (24, 24), (16, 6), (256, 256)])
def test_rope_turns_views_in_place(
    native: CpuOps, reference: ReferenceOps, tokens: int, head_dim: int, rotated: int
) -> None:
    qkv = torch.randn(tokens, 5 + 2 + 2, head_dim)
    expected = qkv.clone()
    angles = torch.randn(tokens, rotated // 2)
    reference.rope_(expected[:, :5], expected[:, 5:7], angles.cos(), angles.sin())
    native.rope_(qkv[:, :5], qkv[:, 5:7], angles.cos(), angles.sin())
    assert_close(qkv, expected, ELEMENTWISE)
    assert torch.equal(qkv[:, 7:], expected[:, 7:])
    assert torch.equal(qkv[..., rotated:], expected[..., rotated:])


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("width", [1, 13, 1536])
def test_gated_activation(
    native: CpuOps, reference: ReferenceOps, activation: Activation, tokens: int, width: int
) -> None:
    gate_up = torch.randn(tokens, 2 * width) * 5
    # in float64, as torch's own float32 gelu loses digits where tanh is near -1
    expected = reference.gated_activation(gate_up.double(), activation).float()
    assert_close(native.gated_activation(gate_up, activation), expected, ELEMENTWISE)


@pytest.mark.parametrize("activation", Activation)
def test_gated_activation_at_the_ends(native: CpuOps, reference: ReferenceOps, activation: Activation) -> None:
    gate = torch.tensor([-1e30, -200.0, -88.5, -87.0, -20.0, -1e-30, 0.0, 1e-30, 20.0, 88.5, 200.0, 1e30, torch.nan])
    gate_up = torch.cat([gate, torch.ones_like(gate)])[None]
    torch.testing.assert_close(
        native.gated_activation(gate_up, activation),
        reference.gated_activation(gate_up.double(), activation).float(),
        rtol=2e-6,
        atol=1e-7,
        equal_nan=True,
    )


def test_silu_keeps_its_relative_accuracy(native: CpuOps) -> None:
    gate = torch.linspace(-80, 80, 20001)
    silu = native.gated_activation(torch.stack([gate, torch.ones_like(gate)]).view(1, -1), Activation.SILU)[0]
    exact = gate.double() / (1 + torch.exp(-gate.double()))
    assert float(((silu - exact) / exact).nan_to_num().abs().max()) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_kv_write_touches_only_its_slots(
    native: CpuOps, reference: ReferenceOps, tokens: int, block_size: int, dtype: torch.dtype
) -> None:
    num_blocks = 200 // block_size
    pool = torch.full((num_blocks, 3, 2, block_size, 2, 24), torch.nan, dtype=dtype)
    expected = pool.clone()
    qkv = torch.randn(tokens, 4 + 2 + 2, 24)
    slots = torch.randperm(num_blocks * block_size)[:tokens]
    reference.kv_write(qkv[:, 4:6], qkv[:, 6:], expected[:, 1], slots)
    native.kv_write(qkv[:, 4:6], qkv[:, 6:], pool[:, 1], slots)
    assert int(expected.isfinite().sum()) == tokens * 2 * 2 * 24
    torch.testing.assert_close(pool, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_kv_write_rounds_as_torch_does(native: CpuOps, dtype: torch.dtype) -> None:
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 1.00390625, 1.01171875, 1e-40, 6.1e-5])
    k = torch.cat([special, torch.randn(4096 - 8)]).view(1, 1, 4096)
    kv = torch.zeros(1, 2, 1, 1, 4096, dtype=dtype)
    native.kv_write(k, k, kv, torch.tensor([0]))
    torch.testing.assert_close(kv[0, 0, 0], k[0].to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("slot", [-1, 16])
def test_kv_write_refuses_slots_outside_the_cache(native: CpuOps, slot: int) -> None:
    k = torch.randn(1, 2, 8)
    with pytest.raises(IndexError, match=f"slot {slot}, the cache has 16"):
        native.kv_write(k, k, torch.zeros(4, 2, 4, 2, 8), torch.tensor([slot]))


def test_odd_head_sizes_are_refused(native: CpuOps) -> None:
    k = torch.randn(1, 2, 12)
    with pytest.raises(ValueError, match="multiple of 8: use kernels='reference'"):
        native.kv_write(k, k, torch.zeros(4, 2, 4, 2, 12), torch.tensor([0]))


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("storage", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
def test_rope_kv_write_is_both(native: CpuOps, tokens: int, storage: torch.dtype) -> None:
    qkv, angles = torch.randn(tokens, 5 + 2 + 2, 24), torch.randn(tokens, 8)
    slots = torch.randperm(40 * 4)[:tokens]
    both, kv = qkv.clone(), torch.full((40, 2, 4, 2, 24), torch.nan, dtype=storage)
    native.rope_(both[:, :5], both[:, 5:7], angles.cos(), angles.sin())
    expected_kv = kv.clone()
    native.kv_write(both[:, 5:7], both[:, 7:], expected_kv, slots)
    native.rope_kv_write(qkv[:, :5], qkv[:, 5:7], qkv[:, 7:], angles.cos(), angles.sin(), kv, slots)
    assert torch.equal(qkv[:, :5], both[:, :5])
    torch.testing.assert_close(kv, expected_kv, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("slot", [-1, 12])
def test_rope_kv_write_refuses_slots_outside_the_cache(native: CpuOps, slot: int) -> None:
    qkv, angles, kv = torch.randn(2, 4, 8), torch.randn(2, 4), torch.zeros(3, 2, 4, 1, 8)
    before = qkv.clone()
    with pytest.raises(IndexError, match=f"slot {slot}, the cache has 12"):
        native.rope_kv_write(
            qkv[:, :2], qkv[:, 2:3], qkv[:, 3:], angles.cos(), angles.sin(), kv, torch.tensor([0, slot])
        )
    assert torch.equal(qkv, before)
    assert not kv.any()

"""The reference against formulas written out another way, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from ragged import context_slots, ragged_batch
from tolerances import ATTENTION, ELEMENTWISE, LINEAR, assert_close

from mlserve.kernels import Activation, kv_pool
from mlserve.kernels.reference import ReferenceOps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_linear_computes_in_the_inputs_dtype(reference: ReferenceOps, dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(3, 20), torch.randn(7, 20).to(dtype), torch.randn(7).to(dtype)
    packed = reference.pack_linear(weight, bias)
    expected = torch.einsum("ti,oi->to", x.double(), weight.double()) + bias.double()
    assert (packed.out_features, packed.in_features) == (7, 20)
    assert_close(reference.linear(x, packed), expected.float(), LINEAR)


def test_embedding_is_float32_on_a_cpu(reference: ReferenceOps) -> None:
    table = torch.randn(11, 5).bfloat16()
    rows = reference.embedding(torch.tensor([10, 0, 10]), reference.pack_linear(table))
    assert rows.dtype == torch.float32
    assert torch.equal(rows, torch.stack([table[10], table[0], table[10]]).float())


def test_rms_norm(reference: ReferenceOps) -> None:
    x, weight = torch.randn(2, 3, 10) * 4, torch.randn(10)
    expected = [
        [[v / math.sqrt(sum(u * u for u in row) / 10 + 0.1) * w for v, w in zip(row, weight.tolist(), strict=True)]
         for row in rows]
        for rows in x.tolist()
    ]  # fmt: skip
    assert_close(reference.rms_norm(x, weight, 0.1), torch.tensor(expected), ELEMENTWISE)


def test_add_rms_norm_adds_in_place(reference: ReferenceOps) -> None:
    x, residual, weight = torch.randn(4, 10), torch.randn(4, 10), torch.randn(10)
    total = x + residual
    normed = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert torch.equal(normed, reference.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("rotated", [8, 6])
def test_rope_turns_pairs_as_complex_numbers(reference: ReferenceOps, rotated: int) -> None:
    q, k, angles = torch.randn(5, 3, 8), torch.randn(5, 1, 8), torch.randn(5, rotated // 2)
    before = [q.clone(), k.clone()]
    reference.rope_(q, k, angles.cos(), angles.sin())
    turn = torch.exp(1j * angles.double())[:, None]
    for x, old in zip((q, k), before, strict=True):
        half = rotated // 2
        pairs = torch.complex(old[..., :half].double(), old[..., half:rotated].double()) * turn
        assert_close(x[..., :rotated], torch.cat([pairs.real, pairs.imag], -1).float(), ELEMENTWISE)
        assert torch.equal(x[..., rotated:], old[..., rotated:])


def test_kv_write_touches_only_its_slots(reference: ReferenceOps) -> None:
    kv = torch.full((4, 2, 3, 2, 8), torch.nan)
    k, v = torch.randn(2, 2, 8), torch.randn(2, 2, 8)
    reference.kv_write(k, v, kv, torch.tensor([11, 4]))
    assert torch.equal(kv[3, 0, 2], k[0])
    assert torch.equal(kv[3, 1, 2], v[0])
    assert torch.equal(kv[1, 0, 1], k[1])
    assert torch.equal(kv[1, 1, 1], v[1])
    assert int(kv.isfinite().sum()) == 2 * k.numel()


@pytest.mark.parametrize("activation", Activation)
def test_gated_activation(reference: ReferenceOps, activation: Activation) -> None:
    gate, up = torch.randn(3, 9) * 3, torch.randn(3, 9)
    g = gate.double()
    act = {
        Activation.SILU: g / (1 + torch.exp(-g)),
        Activation.GELU_TANH: g / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))),
    }[activation]
    assert_close(reference.gated_activation(torch.cat([gate, up], 1), activation), (act * up).float(), ELEMENTWISE)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_paged_attention_one_query_at_a_time(
    reference: ReferenceOps, window: int | None, soft_cap: float | None
) -> None:
    lengths, block_size, scale = [(1, 6), (4, 9), (5, 5)], 4, 0.3
    batch, num_blocks = ragged_batch(lengths, block_size)
    kv = torch.full((num_blocks, 2, block_size, 2, 8), torch.nan)
    flat = kv.transpose(1, 2).flatten(0, 1)  # a copy, [slots, 2, 2, 8]
    q = torch.randn(10, 4, 8)
    expected = []
    for s, (queries, context) in enumerate(lengths):
        slots = context_slots(batch, s, block_size)
        flat[slots] = torch.randn(context, 2, 2, 8)
        for position in range(context - queries, context):
            first = 0 if window is None else max(0, position - window + 1)
            keys, values = flat[slots[first : position + 1]].double().unbind(1)  # [n, 2, 8]
            for head in range(4):
                scores = keys[:, head // 2] @ q[len(expected) // 4, head].double() * scale
                if soft_cap is not None:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                weights = scores.exp() / scores.exp().sum()
                expected.append(weights @ values[:, head // 2])
    kv = flat.unflatten(0, (num_blocks, block_size)).transpose(1, 2).contiguous()
    out = reference.paged_attention(q, kv, batch, scale=scale, window=window, soft_cap=soft_cap)
    assert_close(out, torch.stack(expected).float().view(10, 32), ATTENTION)


@pytest.mark.parametrize("num_blocks", [1, 3000])
def test_kv_pool_is_zero_whatever_its_size(num_blocks: int) -> None:
    """The larger one spans several huge pages."""
    pool = kv_pool(num_blocks, 2, 4, 2, 16, torch.float32, torch.device("cpu"))
    assert pool.shape == (num_blocks, 2, 2, 4, 2, 16)
    assert pool.is_contiguous()
    assert not pool.any()

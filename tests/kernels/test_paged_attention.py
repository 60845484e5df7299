"""Native paged attention against the reference. Whatever it must not read is NaN: slots after a context, blocks that no
window reaches, and its own scratch memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from ragged import Lengths, context_slots, layer_of_pool, ragged_batch, sequence_alone, visible_ends
from tolerances import ATTENTION, assert_close
from torch import Tensor

from mlserve.kernels.cpu.ops import CpuOps
from mlserve.kernels.reference import ReferenceOps

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DECODE: Lengths = [(1, 1), (1, 133), (1, 300), (1, 31), (1, 64)]
PREFILL: Lengths = [(7, 7), (133, 133), (2, 2)]
CHUNKED: Lengths = [(20, 150), (2, 90), (64, 65), (3, 600)]
MIXED: Lengths = [(7, 7), (1, 140), (33, 70), (1, 1), (133, 140)]


def poison_scratch(native: CpuOps) -> None:
    """Leave NaN in the buffers that threads keep: a prefill of NaN, in larger tiles than any test's."""
    batch, num_blocks = ragged_batch([(64, 64)], 16)
    kv = torch.full((num_blocks, 2, 16, 2, 256), torch.nan)
    assert native.paged_attention(torch.full((64, 16, 256), torch.nan), kv, batch, scale=1.0).isnan().all()


def check(
    native: CpuOps,
    reference: ReferenceOps,
    lengths: Lengths,
    *,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    soft_cap: float | None = None,
) -> None:
    batch, num_blocks = ragged_batch(lengths, block_size)
    kv = layer_of_pool(batch, num_blocks, block_size, kv_heads, head_dim, dtype, window)
    qkv = torch.randn(int(batch.query_starts[-1]), heads + 2 * kv_heads, head_dim) * 2
    q, scale = qkv[:, :heads], head_dim**-0.5
    poison_scratch(native)
    out = native.paged_attention(q, kv, batch, scale=scale, window=window, soft_cap=soft_cap)
    expected = reference.paged_attention(q, kv, batch, scale=scale, window=window, soft_cap=soft_cap)
    assert out.shape == (len(q), heads * head_dim)
    assert_close(out, expected, ATTENTION)  # fmt: skip


@pytest.mark.parametrize("lengths", [DECODE, PREFILL, CHUNKED, MIXED], ids=["decode", "prefill", "chunked", "mixed"])
@pytest.mark.parametrize(
    ("dtype", "block_size"),
    [(torch.float32, 1), (torch.float32, 16), (torch.bfloat16, 4), (torch.bfloat16, 256), (torch.float16, 16)],
    ids=str,
)
def test_traffic_storage_and_block_size(
    native: CpuOps, reference: ReferenceOps, lengths: Lengths, dtype: torch.dtype, block_size: int
) -> None:
    check(native, reference, lengths, dtype=dtype, block_size=block_size)


@pytest.mark.parametrize("head_dim", [8, 16, 24, 64, 80, 96, 128, 256], ids=lambda d: f"D{d}")
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (9, 3), (4, 1), (16, 2), (5, 1)], ids=lambda n: str(n))
def test_head_sizes_and_groups(
    native: CpuOps, reference: ReferenceOps, head_dim: int, heads: int, kv_heads: int
) -> None:
    check(native, reference, MIXED, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=4)


@pytest.mark.parametrize("lengths", [DECODE, CHUNKED, MIXED], ids=["decode", "chunked", "mixed"])
@pytest.mark.parametrize("window", [1, 5, 16, 70, 1000])
@pytest.mark.parametrize("soft_cap", [None, 3.0], ids=["plain", "capped"])
def test_windows_and_soft_caps(
    native: CpuOps, reference: ReferenceOps, lengths: Lengths, window: int, soft_cap: float | None
) -> None:
    check(native, reference, lengths, window=window, soft_cap=soft_cap, block_size=4)


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("lengths", [DECODE, MIXED], ids=["decode", "mixed"])
def test_soft_cap_without_a_window(native: CpuOps, reference: ReferenceOps, lengths: Lengths) -> None:
    check(native, reference, lengths, soft_cap=1.5, dtype=torch.bfloat16)


def test_scores_far_apart(native: CpuOps, reference: ReferenceOps) -> None:
    """Peaks that move from tile to tile, by more than exp can hold."""
    batch, num_blocks = ragged_batch([(1, 200), (130, 200)], 16)
    kv = layer_of_pool(batch, num_blocks, 16, 1, 16, torch.float32)
    q = torch.randn(131, 2, 16) * 100
    out = native.paged_attention(q, kv, batch, scale=1.0)
    assert out.isfinite().all()
    torch.testing.assert_close(out, reference.paged_attention(q, kv, batch, scale=1.0), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("window", [None, 50])
def test_same_bits_in_any_batch(native: CpuOps, window: int | None) -> None:
    lengths = [*DECODE, *CHUNKED, *MIXED]
    batch, num_blocks = ragged_batch(lengths, 16)
    kv = layer_of_pool(batch, num_blocks, 16, 2, 64, torch.float32)
    q = torch.randn(int(batch.query_starts[-1]), 6, 64)
    together = native.paged_attention(q, kv, batch, scale=0.125, window=window)
    for s in range(len(lengths)):
        rows = slice(*batch.query_starts[s : s + 2].tolist())
        alone = sequence_alone(batch, s)
        assert torch.equal(native.paged_attention(q[rows], kv, alone, scale=0.125, window=window), together[rows])


def test_a_sequence_may_have_no_query(native: CpuOps, reference: ReferenceOps) -> None:
    check(native, reference, [(0, 20), (1, 20), (0, 3)])


def test_bad_batches_are_refused(native: CpuOps) -> None:
    batch, num_blocks = ragged_batch([(2, 20)], 16)
    kv, q = torch.zeros(num_blocks, 2, 16, 2, 8), torch.zeros(2, 4, 8)

    def attend(q: Tensor = q, window: int | None = None, **changes: Tensor) -> Tensor:
        return native.paged_attention(q, kv, dataclasses.replace(batch, **changes), scale=1.0, window=window)

    with pytest.raises(IndexError, match=f"block {num_blocks}, the cache has {num_blocks}"):
        attend(block_table=torch.tensor([1, num_blocks]).int())
    with pytest.raises(ValueError, match="longer than its blocks"):
        attend(context_lens=torch.tensor([33]).int())
    with pytest.raises(ValueError, match="more queries than context"):
        attend(context_lens=torch.tensor([1]).int())
    with pytest.raises(ValueError, match="query_starts"):
        attend(q=torch.zeros(3, 4, 8))
    with pytest.raises(ValueError, match="int32"):
        attend(block_table=batch.block_table.long())
    with pytest.raises(ValueError, match="multiple of kv_heads"):
        attend(q=torch.zeros(2, 3, 8))
    with pytest.raises(ValueError, match="window"):
        attend(window=0)


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("span", [1, 5, 64, 1000])
@pytest.mark.parametrize("lengths", [DECODE, PREFILL, CHUNKED, MIXED], ids=["decode", "prefill", "chunked", "mixed"])
def test_queries_that_see_beyond_themselves(
    native: CpuOps, reference: ReferenceOps, lengths: Lengths, span: int, window: int | None
) -> None:
    batch, num_blocks = ragged_batch(lengths, 16)
    causal = batch
    batch = dataclasses.replace(batch, visible_ends=visible_ends(batch, span))
    kv = layer_of_pool(batch, num_blocks, 16, 2, 64, torch.float32, window)
    q = torch.randn(int(batch.query_starts[-1]), 6, 64) * 2
    poison_scratch(native)
    out = native.paged_attention(q, kv, batch, scale=0.125, window=window)
    assert_close(out, reference.paged_attention(q, kv, batch, scale=0.125, window=window), ATTENTION)
    if span == 1:
        assert_close(out, reference.paged_attention(q, kv, causal, scale=0.125, window=window), ATTENTION)


def test_the_reference_sees_up_to_the_end(reference: ReferenceOps) -> None:
    """Two sequences' worth of keys with the value of their position: the mean of those that are seen."""
    batch, num_blocks = ragged_batch([(4, 6)], 4)
    kv = torch.zeros(num_blocks, 2, 4, 1, 8)
    slots = context_slots(batch, 0, 4)
    kv[slots // 4, 1, slots % 4] = torch.arange(6.0)[:, None, None].expand(6, 1, 8)
    ends = torch.tensor([3, 6, 6, 6], dtype=torch.int32)
    out = reference.paged_attention(torch.zeros(4, 1, 8), kv, dataclasses.replace(batch, visible_ends=ends), scale=1.0)
    assert out[:, 0].tolist() == pytest.approx([1.0, 2.5, 2.5, 2.5])
    out = reference.paged_attention(
        torch.zeros(4, 1, 8), kv, dataclasses.replace(batch, visible_ends=ends), scale=1.0, window=3
    )
    assert out[:, 0].tolist() == pytest.approx([1.0, 3.0, 3.5, 4.0])  # from p - 2 on


@pytest.mark.parametrize("ends", [[3, 6, 5, 6], [2, 6, 6, 6], [3, 6, 6, 7], [3, 6, 6]])
def test_wrong_visible_ends_are_refused(native: CpuOps, ends: list[int]) -> None:
    batch, num_blocks = ragged_batch([(4, 6)], 4)
    batch = dataclasses.replace(batch, visible_ends=torch.tensor(ends, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"visible_ends|index tensors"):
        native.paged_attention(torch.zeros(4, 1, 8), torch.zeros(num_blocks, 2, 4, 1, 8), batch, scale=1.0)

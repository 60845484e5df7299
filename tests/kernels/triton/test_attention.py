"""Paged attention in Triton against the reference. Whatever it must not read is NaN: slots after a context, blocks that
no window reaches, and scratch memory. Shapes are small for the interpreter's sake; test_attention_gpu has real ones.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from ragged import Lengths, context_slots, layer_of_pool, ragged_batch, sequence_alone, visible_ends
from tolerances import TRITON, assert_close
from torch import Tensor

from mlserve.kernels import PagedBatch
from mlserve.kernels.reference import ReferenceOps
from mlserve.kernels.triton import attention, attention_decode
from mlserve.kernels.triton.attention import paged_attention

DECODE: Lengths = [(1, 1), (1, 133), (1, 600), (1, 256), (1, 64)]
PREFILL: Lengths = [(7, 7), (133, 133), (2, 2)]
CHUNKED: Lengths = [(20, 150), (2, 90), (3, 300)]
MIXED: Lengths = [(7, 7), (1, 140), (33, 70), (0, 20), (1, 1), (40, 100), (1, 300)]
TRAFFIC = {"decode": DECODE, "prefill": PREFILL, "chunked": CHUNKED, "mixed": MIXED}
REFERENCE = ReferenceOps()


def on(device: torch.device, batch: PagedBatch) -> PagedBatch:
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    moved = {name: value.to(device) for name, value in fields.items() if isinstance(value, Tensor)}
    return dataclasses.replace(batch, **moved)


def check(
    device: torch.device,
    lengths: Lengths,
    *,
    heads: int = 3,
    kv_heads: int = 1,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    span: int | None = None,
) -> None:
    """With `span` each query sees up to the end of its run of that many positions."""
    batch, num_blocks = ragged_batch(lengths, block_size)
    if span is not None:
        batch = dataclasses.replace(batch, visible_ends=visible_ends(batch, span))
    kv = layer_of_pool(batch, num_blocks, block_size, kv_heads, head_dim, kv_dtype or dtype, window)
    qkv = (torch.randn(int(batch.query_starts[-1]), heads + 2 * kv_heads, head_dim) * 2).to(dtype)
    q, kv, batch = qkv.to(device)[:, :heads], kv.to(device), on(device, batch)
    scale = head_dim**-0.5
    out = paged_attention(q, kv, batch, scale=scale, window=window, soft_cap=soft_cap)
    assert out.dtype == dtype
    assert out.shape == (len(q), heads * head_dim)
    expected = REFERENCE.paged_attention(q, kv, batch, scale=scale, window=window, soft_cap=soft_cap)
    assert_close(out, expected, TRITON[dtype])


@pytest.mark.parametrize("lengths", TRAFFIC.values(), ids=TRAFFIC)
@pytest.mark.parametrize(
    ("dtype", "block_size"), [(torch.float32, 16), (torch.bfloat16, 8), (torch.float16, 32)], ids=str
)
def test_traffic_types_and_block_sizes(
    device: torch.device, lengths: Lengths, dtype: torch.dtype, block_size: int
) -> None:
    check(device, lengths, dtype=dtype, block_size=block_size)


@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads"),
    [(16, 3, 3), (64, 9, 3), (80, 4, 1), (96, 16, 1), (128, 5, 1), (256, 8, 4)],
    ids=lambda n: str(n),
)
def test_head_sizes_and_groups(device: torch.device, head_dim: int, heads: int, kv_heads: int) -> None:
    check(device, [(19, 40), (1, 33)], heads=heads, kv_heads=kv_heads, head_dim=head_dim)


def test_a_group_larger_than_a_tile(device: torch.device) -> None:
    check(device, [(3, 20), (1, 20)], heads=71)


@pytest.mark.parametrize("window", [1, 5, 70, 1000])
@pytest.mark.parametrize("soft_cap", [None, 3.0], ids=["plain", "capped"])
def test_windows_and_soft_caps(device: torch.device, window: int, soft_cap: float | None) -> None:
    check(device, MIXED, window=window, soft_cap=soft_cap, block_size=8)


def test_soft_cap_without_a_window(device: torch.device) -> None:
    check(device, MIXED, soft_cap=1.5)


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("span", [1, 5, 64, 1000])
def test_queries_that_see_beyond_themselves(device: torch.device, span: int, window: int | None) -> None:
    check(device, MIXED, span=span, window=window)


def test_storage_of_another_type(device: torch.device) -> None:
    check(device, MIXED, kv_dtype=torch.bfloat16)
    check(device, MIXED, kv_dtype=torch.float8_e4m3fn)


def test_more_sequences_than_one_search_sees(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_decode, "ENOUGH_PROGRAMS", 1)  # for the interpreter's sake
    check(device, [(0, 1)] * 254 + [(2, 2), (1, 3), (0, 1), (9, 9)], heads=1, head_dim=16)


def test_more_splits_than_are_merged_at_once(device: torch.device) -> None:
    """And the highest scores come last."""
    context = 16 * attention_decode.SPLIT + 300
    batch, num_blocks = ragged_batch([(1, context)], 16)
    kv = layer_of_pool(batch, num_blocks, 16, 1, 16, torch.float32)
    last = context_slots(batch, 0, 16, first=context - 20)
    kv[last // 16, 0, last % 16] *= 10
    kv, q, batch = kv.to(device), torch.randn(1, 1, 16).to(device), on(device, batch)
    out = paged_attention(q, kv, batch, scale=0.25)
    assert_close(out, REFERENCE.paged_attention(q, kv, batch, scale=0.25), TRITON[torch.float32])


def test_scores_far_apart(device: torch.device) -> None:
    """Peaks that move from tile to tile and from split to split, by more than exp can hold."""
    batch, num_blocks = ragged_batch([(1, 600), (130, 200)], 16)
    kv = layer_of_pool(batch, num_blocks, 16, 1, 16, torch.float32).to(device)
    q = (torch.randn(131, 2, 16) * 100).to(device)
    batch = on(device, batch)
    out = paged_attention(q, kv, batch, scale=1.0)
    torch.testing.assert_close(out, REFERENCE.paged_attention(q, kv, batch, scale=1.0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 50])
def test_same_bits_in_any_batch(device: torch.device, dtype: torch.dtype, window: int | None) -> None:
    lengths = [(1, 300), (7, 7), (1, 31), (35, 90)]
    batch, num_blocks = ragged_batch(lengths, 16)
    kv = layer_of_pool(batch, num_blocks, 16, 1, 64, dtype).to(device)
    q = torch.randn(int(batch.query_starts[-1]), 3, 64).to(dtype).to(device)
    together = paged_attention(q, kv, on(device, batch), scale=0.125, window=window)
    for s in range(len(lengths)):
        rows = slice(*batch.query_starts[s : s + 2].tolist())
        alone = on(device, sequence_alone(batch, s))
        assert torch.equal(paged_attention(q[rows], kv, alone, scale=0.125, window=window), together[rows])


def test_same_bits_from_any_number_of_programs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, num_blocks = ragged_batch([(1, 1100), (1, 300)], 16)
    kv = layer_of_pool(batch, num_blocks, 16, 1, 64, torch.float32).to(device)
    q, batch = torch.randn(2, 4, 64).to(device), on(device, batch)
    many = paged_attention(q, kv, batch, scale=0.125)
    for enough, programs in ((1, 1), (5, 2)):
        monkeypatch.setattr(attention_decode, "ENOUGH_PROGRAMS", enough)
        decode, _ = attention_decode.decode_launches(q, kv, batch, many, 0.125, None, None)
        assert decode.grid[2] == programs
        assert torch.equal(paged_attention(q, kv, batch, scale=0.125), many)


@pytest.mark.parametrize(("lengths", "launcher"), [(DECODE, "prefill_launch"), (PREFILL, "decode_launches")])
def test_a_kernel_without_work_is_spared(
    device: torch.device, lengths: Lengths, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, num_blocks = ragged_batch(lengths, 16)
    kv = layer_of_pool(batch, num_blocks, 16, 1, 16, torch.float32).to(device)
    q, batch = torch.randn(int(batch.query_starts[-1]), 1, 16).to(device), on(device, batch)
    expected = paged_attention(q, kv, batch, scale=0.25)
    monkeypatch.delattr(attention, launcher)
    known = dataclasses.replace(batch, num_decodes=sum(queries == 1 for queries, _ in lengths))
    assert torch.equal(paged_attention(q, kv, known, scale=0.25), expected)


def test_padded_decodes(device: torch.device) -> None:
    """As a captured graph has them: sequences of one token in block 0, and block tables with room to spare."""
    batch, num_blocks = ragged_batch([(1, 300), (1, 20)], 16)
    kv = layer_of_pool(batch, num_blocks, 16, 1, 64, torch.float32)
    kv[0] = 0.0
    q = torch.randn(4, 3, 64)
    used = int(batch.block_starts[-1])
    padded = dataclasses.replace(
        batch,
        query_starts=torch.arange(5).int(),
        context_lens=torch.cat([batch.context_lens, torch.ones(2)]).int(),
        block_table=torch.cat([batch.block_table, torch.zeros(50)]).int(),
        block_starts=torch.cat([batch.block_starts, torch.tensor([used + 1, used + 2])]).int(),
    )
    kv, q = kv.to(device), q.to(device)
    out = paged_attention(q, kv, on(device, padded), scale=0.125)
    assert torch.equal(out[:2], paged_attention(q[:2], kv, on(device, batch), scale=0.125))
    assert torch.equal(out[2:], torch.zeros_like(out[2:]))


def test_what_a_query_sees(device: torch.device) -> None:
    """Values that are their position, and equal scores: the mean of the positions that are seen."""
    batch, num_blocks = ragged_batch([(4, 6)], 8)
    kv = torch.zeros(num_blocks, 2, 8, 1, 16)
    slots = context_slots(batch, 0, 8)
    kv[slots // 8, 1, slots % 8] = torch.arange(6.0)[:, None, None].expand(6, 1, 16)
    kv, q, batch = kv.to(device), torch.zeros(4, 1, 16, device=device), on(device, batch)

    def means(batch: PagedBatch, window: int | None = None) -> list[float]:
        out: list[float] = paged_attention(q, kv, batch, scale=1.0, window=window)[:, 0].tolist()
        return out

    assert means(batch) == pytest.approx([1.0, 1.5, 2.0, 2.5])
    assert means(batch, window=3) == pytest.approx([1.0, 2.0, 3.0, 4.0])
    ahead = dataclasses.replace(batch, visible_ends=torch.tensor([3, 6, 6, 6], dtype=torch.int32, device=device))
    assert means(ahead) == pytest.approx([1.0, 2.5, 2.5, 2.5])
    assert means(ahead, window=3) == pytest.approx([1.0, 3.0, 3.5, 4.0])

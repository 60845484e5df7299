"""Attention and cache writes in Triton on a GPU: real shapes, inside a captured graph, and in a pool beyond 2^31."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from ragged import Lengths, layer_of_pool, ragged_batch
from tolerances import TRITON, assert_close
from torch import Tensor

from mlserve.kernels import PagedBatch, kv_pool
from mlserve.kernels.reference import ReferenceOps
from mlserve.kernels.triton.attention import paged_attention
from mlserve.kernels.triton.kv_cache import kv_write
from mlserve.kernels.triton.rope import rope_kv_write

pytestmark = pytest.mark.gpu

DECODE: Lengths = [(1, context) for context in (1, 17, 255, 256, 257, 1000, 4096, 9000)]
MIXED: Lengths = [(1, 700), (512, 512), (300, 2048), (1, 33), (64, 4000), (7, 7)]
SHAPES = {"llama-8b": (32, 8, 128), "qwen-0.5b": (14, 2, 64), "phi-2": (32, 32, 80), "gemma-2b": (8, 1, 256)}
REFERENCE = ReferenceOps()


def on(device: torch.device, batch: PagedBatch) -> PagedBatch:
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    moved = {name: value.to(device) for name, value in fields.items() if isinstance(value, Tensor)}
    return dataclasses.replace(batch, **moved)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("lengths", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (1024, None), (None, 50.0)], ids=str)
def test_real_shapes(
    device: torch.device,
    lengths: Lengths,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    window: int | None,
    soft_cap: float | None,
) -> None:
    heads, kv_heads, head_dim = shape
    batch, num_blocks = ragged_batch(lengths, 16)
    kv = layer_of_pool(batch, num_blocks, 16, kv_heads, head_dim, dtype, window).to(device)
    q = torch.randn(int(batch.query_starts[-1]), heads, head_dim, device=device).to(dtype)
    batch, scale = on(device, batch), head_dim**-0.5
    out = paged_attention(q, kv, batch, scale=scale, window=window, soft_cap=soft_cap)
    expected = REFERENCE.paged_attention(q, kv, batch, scale=scale, window=window, soft_cap=soft_cap)
    assert_close(out, expected, TRITON[dtype])


@pytest.mark.parametrize("lengths", [DECODE, MIXED], ids=["decode", "mixed"])
def test_float8_storage(device: torch.device, lengths: Lengths) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU that converts float8_e4m3fn")
    batch, num_blocks = ragged_batch(lengths, 16)
    kv = layer_of_pool(batch, num_blocks, 16, 8, 128, torch.float8_e4m3fn).to(device)
    q = torch.randn(int(batch.query_starts[-1]), 32, 128, device=device).bfloat16()
    batch = on(device, batch)
    out = paged_attention(q, kv, batch, scale=128**-0.5)
    expected = REFERENCE.paged_attention(q, kv, batch, scale=128**-0.5)
    assert_close(out, expected, TRITON[torch.bfloat16])


def test_a_captured_decode_replays(device: torch.device) -> None:
    """The graph is captured over one batch and replayed over another, with other lengths and blocks."""
    first, num_blocks = ragged_batch([(1, 40)] * 4, 16)
    second, more_blocks = ragged_batch([(1, 300), (1, 1), (1, 1000), (1, 16)], 16)
    room = len(second.block_table)
    first = dataclasses.replace(first, block_table=torch.cat([first.block_table, torch.zeros(room)])[:room].int())
    kv = torch.randn(max(num_blocks, more_blocks), 2, 16, 8, 128, device=device).bfloat16()
    q, k, v = torch.randn(4, 48, 128, device=device).bfloat16().split_with_sizes((32, 8, 8), 1)
    angles = torch.randn(4, 64, device=device)
    cos, sin = angles.cos(), angles.sin()
    batch = dataclasses.replace(on(device, first), num_decodes=4)

    def step(q: Tensor, kv: Tensor) -> Tensor:
        rope_kv_write(q, k, v, cos, sin, kv, batch.slot_mapping)
        return paged_attention(q, kv, batch, scale=0.1)

    step(q.clone(), kv.clone())  # compiles
    graph, static_q, static_kv = torch.cuda.CUDAGraph(), q.clone(), kv.clone()
    with torch.cuda.graph(graph):
        out = step(static_q, static_kv)
    for name in ("slot_mapping", "context_lens", "block_table", "block_starts"):
        getattr(batch, name).copy_(getattr(second, name))
    static_q.copy_(q), static_kv.copy_(kv)
    graph.replay()
    assert torch.equal(out, step(q.clone(), kv.clone()))


def test_a_pool_beyond_32_bits(device: torch.device) -> None:
    """The last block starts beyond 2^31 elements."""
    pool = kv_pool(2**31 // 2**20 + 2, 32, 16, 8, 128, torch.bfloat16, device)
    kv, last = pool[:, 31], len(pool) - 1
    batch, _ = ragged_batch([(1, 9), (16, 16)], 16)
    table = torch.tensor([last, last - 1]).int()
    slots = torch.cat([torch.tensor([last * 16 + 8]), (last - 1) * 16 + torch.arange(16)])
    batch = on(device, dataclasses.replace(batch, block_table=table, slot_mapping=slots))
    kv[last - 1 :] = torch.randn(2, 2, 16, 8, 128, device=device).bfloat16()
    q, k, v = torch.randn(17, 48, 128, device=device).bfloat16().split_with_sizes((32, 8, 8), 1)
    kv_write(k, v, kv, batch.slot_mapping)
    assert torch.equal(kv[last, :, 8], torch.stack([k[0], v[0]]))
    out = paged_attention(q, kv, batch, scale=0.1)
    assert_close(out, REFERENCE.paged_attention(q, kv, batch, scale=0.1), TRITON[torch.bfloat16])

"""Rotation and writing of the cache in Triton against the reference."""

from __future__ import annotations

import pytest
import torch
from tolerances import ELEMENTWISE, TRITON, assert_close
from torch import Tensor

from mlserve.errors import ConfigError
from mlserve.kernels.reference import ReferenceOps
from mlserve.kernels.triton.kv_cache import check_cache_type, kv_write
from mlserve.kernels.triton.rope import rope_, rope_kv_write

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SLOTS = [37, 4, 90, 15, 16]
REFERENCE = ReferenceOps()


def qkv_views(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of five tokens: views of one matrix."""
    qkv = torch.randn(len(SLOTS), heads + 2 * kv_heads, head_dim).to(dtype).to(device)
    q, k, v = qkv.split_with_sizes((heads, kv_heads, kv_heads), 1)
    return q, k, v


def rotations(device: torch.device, half: int) -> tuple[Tensor, Tensor]:
    angles = torch.randn(len(SLOTS), half, device=device) * 10
    return angles.cos(), angles.sin()


def cache(device: torch.device, dtype: torch.dtype, kv_heads: int, head_dim: int, block_size: int = 16) -> Tensor:
    """One layer of a pool of three, NaN all over."""
    pool = torch.full((96 // block_size, 3, 2, block_size, kv_heads, head_dim), torch.nan, dtype=dtype, device=device)
    return pool[:, 1]


@pytest.mark.parametrize("storage", [*DTYPES, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("kv_heads", "head_dim", "block_size"), [(1, 64, 8), (3, 80, 16), (9, 256, 32)], ids=str)
def test_kv_write(device: torch.device, storage: torch.dtype, kv_heads: int, head_dim: int, block_size: int) -> None:
    _, k, v = qkv_views(device, torch.float32, 2, kv_heads, head_dim)
    for x in (k, v):  # numbers that the cache holds exactly: the interpreter truncates where a GPU rounds
        x.copy_(x.to(storage))
    kv, expected = (cache(device, storage, kv_heads, head_dim, block_size) for _ in range(2))
    slots = torch.tensor(SLOTS, device=device)
    kv_write(k, v, kv, slots)
    REFERENCE.kv_write(k, v, expected, slots)
    assert torch.equal(kv.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))  # NaN included


def test_float8_saturates(device: torch.device) -> None:
    k = torch.tensor([1e6, -1e6, 448.0, -448.0, 0.0, 1.5, torch.inf, -torch.inf]).repeat(5, 1, 2).to(device)
    kv = cache(device, torch.float8_e4m3fn, 1, 16)
    kv_write(k, k, kv, torch.tensor(SLOTS, device=device))
    stored = kv.float()[SLOTS[0] // 16, :, SLOTS[0] % 16, 0, :8]
    assert stored.tolist() == [[448.0, -448.0, 448.0, -448.0, 0.0, 1.5, 448.0, -448.0]] * 2


@pytest.mark.parametrize(("capability", "fits"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((10, 0), True)])
def test_float8_needs_a_gpu_that_converts_it(
    capability: tuple[int, int], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlserve.kernels.triton.kv_cache.compute_capability", lambda device: capability)
    kv = torch.empty(2, 2, 16, 1, 64, dtype=torch.float8_e4m3fn)
    check_cache_type(kv.to(torch.bfloat16))
    if fits:
        check_cache_type(kv)
        return
    with pytest.raises(ConfigError, match=r"compute capability 8\.[06], the least .* 8\.9"):
        check_cache_type(kv)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotated"),
    [(2, 2, 64, 64), (9, 3, 80, 80), (6, 1, 96, 96), (40, 2, 128, 128), (4, 1, 256, 256), (3, 1, 80, 32)],
    ids=str,
)
def test_rope(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, rotated: int) -> None:
    q, k, v = qkv_views(device, dtype, heads, kv_heads, head_dim)
    cos, sin = rotations(device, rotated // 2)
    expected_q, expected_k, before_k, before_v = q.clone(), k.clone(), k.clone(), v.clone()
    fused_q = q.clone()
    kv, expected_kv = (cache(device, dtype, kv_heads, head_dim) for _ in range(2))
    slots = torch.tensor(SLOTS, device=device)
    tolerance = ELEMENTWISE if dtype == torch.float32 else TRITON[dtype]

    rope_kv_write(fused_q, k, v, cos, sin, kv, slots)
    assert torch.equal(k, before_k)
    rope_(q, k, cos, sin)
    REFERENCE.rope_(expected_q, expected_k, cos, sin)
    assert_close(q, expected_q, tolerance)
    assert_close(k, expected_k, tolerance)
    assert torch.equal(q[..., rotated:], expected_q[..., rotated:])
    assert torch.equal(v, before_v)

    assert torch.equal(fused_q, q)
    REFERENCE.kv_write(k, v, expected_kv, slots)
    assert torch.equal(kv.nan_to_num(7.0), expected_kv.nan_to_num(7.0))

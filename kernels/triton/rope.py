"""Rotary position embedding (Su et al. 2021) in NeoX layout, alone and together with writing the cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlserve.kernels import kv_pool
from mlserve.kernels.triton.configs import KernelConfig, Launch
from mlserve.kernels.triton.kv_cache import cache_strides, check_cache_type, slot_offset, to_storage

__all__ = ["configs", "rope_", "rope_kv_write"]

PROGRAM_PAIRS = 2048  # that one program rotates: 16 a thread


def rope_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """See `mlserve.kernels.Ops.rope_`."""
    _rope_launch(q, k, cos, sin).run()


def rope_kv_write(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, slot_mapping: Tensor) -> None:
    """`rope_(q, k)` and `kv_write(k, v)` in one launch, with arguments as theirs.

    k itself is left as it is, since only the cache's copy is read from then on.
    """
    check_cache_type(kv)
    _fused_launch(q, k, v, cos, sin, kv, slot_mapping).run()


def _rope_launch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Launch:
    grid, args, constants = _rotation(q, k, cos, sin)
    return Launch(_rope_kernel, grid, args, constants)


def _fused_launch(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, slot_mapping: Tensor
) -> Launch:
    grid, args, constants = _rotation(q, k, cos, sin)
    args |= {"v_pointer": v, "kv_pointer": kv, "slot_mapping": slot_mapping, **cache_strides(kv)}
    args |= {"stride_v_token": v.stride(0), "stride_v_head": v.stride(1)}
    head_dim = k.shape[2]
    block_d = triton.next_power_of_2(head_dim)
    constants |= {"HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK_SIZE": kv.shape[2]}
    return Launch(_rope_kv_write_kernel, grid, args, constants)


def _rotation(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[tuple[int, int], dict[str, Tensor | int], dict[str, int]]:
    """Grid, arguments and constants of both kernels: programs of a token for q's heads come before those for k's."""
    half = cos.shape[1]
    block_half = triton.next_power_of_2(half)
    block_h = min(triton.next_power_of_2(q.shape[1]), max(1, PROGRAM_PAIRS // block_half))
    q_programs = triton.cdiv(q.shape[1], block_h)
    args: dict[str, Tensor | int] = {"q_pointer": q, "k_pointer": k, "cos_pointer": cos, "sin_pointer": sin}
    args |= {"stride_q_token": q.stride(0), "stride_q_head": q.stride(1)}
    args |= {"stride_k_token": k.stride(0), "stride_k_head": k.stride(1)}
    args |= {"stride_cos": cos.stride(0), "stride_sin": sin.stride(0)}
    constants = {"Q_HEADS": q.shape[1], "K_HEADS": k.shape[1], "Q_PROGRAMS": q_programs}
    constants |= {"HALF": half, "BLOCK_H": block_h, "BLOCK_HALF": block_half}
    return (q.shape[0], q_programs + triton.cdiv(k.shape[1], block_h)), args, constants


@triton.jit
def _load_rotated(row, cos_row, sin_row, heads, pairs, inside, stride_head, HALF: tl.constexpr):
    """Both halves of some heads of the token at `row`, rotated: `[BLOCK_H, BLOCK_HALF]` float32 each."""
    cos = tl.load(cos_row + pairs, mask=pairs < HALF)
    sin = tl.load(sin_row + pairs, mask=pairs < HALF)
    a = tl.load(row + heads * stride_head + pairs, mask=inside).to(tl.float32)
    b = tl.load(row + heads * stride_head + pairs + HALF, mask=inside).to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _rotate_(
    row, cos_row, sin_row, first_head, stride_head,
    NUM_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """BLOCK_H heads of the token at `row` in place."""
    heads = (first_head + tl.arange(0, BLOCK_H))[:, None]
    pairs = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (heads < NUM_HEADS) & (pairs < HALF)
    a, b = _load_rotated(row, cos_row, sin_row, heads, pairs, inside, stride_head, HALF)
    at = row + heads * stride_head + pairs
    tl.store(at, a.to(row.dtype.element_ty), mask=inside)
    tl.store(at + HALF, b.to(row.dtype.element_ty), mask=inside)


@triton.jit
def _rope_kernel(
    q_pointer, k_pointer, cos_pointer, sin_pointer,
    stride_q_token, stride_q_head, stride_k_token, stride_k_head, stride_cos, stride_sin,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, Q_PROGRAMS: tl.constexpr,
    HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Some heads of one token's q, or of its k."""
    token, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cos, sin = cos_pointer + token * stride_cos, sin_pointer + token * stride_sin
    if program < Q_PROGRAMS:
        row = q_pointer + token * stride_q_token
        _rotate_(row, cos, sin, program * BLOCK_H, stride_q_head, Q_HEADS, HALF, BLOCK_H, BLOCK_HALF)
    else:
        row = k_pointer + token * stride_k_token
        first_head = (program - Q_PROGRAMS) * BLOCK_H
        _rotate_(row, cos, sin, first_head, stride_k_head, K_HEADS, HALF, BLOCK_H, BLOCK_HALF)


@triton.jit
def _rope_kv_write_kernel(
    q_pointer, k_pointer, v_pointer, cos_pointer, sin_pointer, kv_pointer, slot_mapping,
    stride_q_token, stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    stride_cos, stride_sin, stride_block, stride_values, stride_slot, stride_kv_head,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, Q_PROGRAMS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Some heads of one token's q in place, or of its k and v into the cache."""
    token, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cos, sin = cos_pointer + token * stride_cos, sin_pointer + token * stride_sin
    if program < Q_PROGRAMS:
        row = q_pointer + token * stride_q_token
        _rotate_(row, cos, sin, program * BLOCK_H, stride_q_head, Q_HEADS, HALF, BLOCK_H, BLOCK_HALF)
    else:
        storage: tl.constexpr = kv_pointer.dtype.element_ty
        k_row, v_row = k_pointer + token * stride_k_token, v_pointer + token * stride_v_token
        slot = kv_pointer + slot_offset(slot_mapping, token, stride_block, stride_slot, BLOCK_SIZE)
        heads = ((program - Q_PROGRAMS) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
        pairs = tl.arange(0, BLOCK_HALF)[None, :]
        inside = (heads < K_HEADS) & (pairs < HALF)
        a, b = _load_rotated(k_row, cos, sin, heads, pairs, inside, stride_k_head, HALF)
        at = slot + heads * stride_kv_head + pairs
        # k is rounded to the type of activations first, as rotating in place would round it
        tl.store(at, to_storage(a.to(k_pointer.dtype.element_ty), storage), mask=inside)
        tl.store(at + HALF, to_storage(b.to(k_pointer.dtype.element_ty), storage), mask=inside)

        dims = tl.arange(0, BLOCK_D)[None, :]
        at = slot + heads * stride_kv_head + dims
        inside = (heads < K_HEADS) & (dims < HEAD_DIM)
        if 2 * HALF < HEAD_DIM:  # dimensions that aren't rotated
            rest = inside & (dims >= 2 * HALF)
            k = tl.load(k_row + heads * stride_k_head + dims, mask=rest)
            tl.store(at, to_storage(k, storage), mask=rest)
        v = tl.load(v_row + heads * stride_v_head + dims, mask=inside)
        tl.store(at + stride_values, to_storage(v, storage), mask=inside)


def configs() -> Iterator[KernelConfig]:
    meta = torch.device("meta")
    for head_dim in (80, 128):
        q = torch.empty(64, 32, head_dim, dtype=torch.bfloat16, device=meta)
        k = torch.empty(64, 8, head_dim, dtype=torch.bfloat16, device=meta)
        cos = torch.empty(64, head_dim // 2, device=meta)
        kv = kv_pool(64, 32, 16, 8, head_dim, torch.bfloat16, meta)[:, 0]
        slots = torch.empty(64, dtype=torch.int64, device=meta)
        yield _rope_launch(q, k, cos, cos).config(f"rope-D{head_dim}-bf16")
        yield _fused_launch(q, k, k, cos, cos, kv, slots).config(f"rope_kv_write-D{head_dim}-bf16")

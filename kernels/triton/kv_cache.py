"""Writing keys and values into the paged cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlserve.errors import ConfigError
from mlserve.kernels import kv_pool
from mlserve.kernels.triton.configs import KernelConfig, Launch
from mlserve.kernels.triton.devices import Capability, compute_capability

__all__ = ["cache_strides", "check_cache_type", "configs", "kv_write", "slot_offset", "to_storage"]

PROGRAM_ELEMENTS = 2048  # of keys, and as many of values, that one program copies: 16 a thread
FLOAT8_CAPABILITY: Capability = (8, 9)  # from which GPUs, and so Triton, convert e4m3fn
FLOAT8_MAX = tl.constexpr(448.0)  # of e4m3fn, which has no infinity


def kv_write(k: Tensor, v: Tensor, kv: Tensor, slot_mapping: Tensor) -> None:
    """See `mlserve.kernels.Ops.kv_write`. What float8_e4m3fn can't hold is stored as its largest number."""
    check_cache_type(kv)
    _launch(k, v, kv, slot_mapping).run()


def check_cache_type(kv: Tensor) -> None:
    """Raises ConfigError if the GPU can't convert what the cache is stored in."""
    if kv.dtype != torch.float8_e4m3fn:
        return
    major, minor = compute_capability(kv.device)
    if (major, minor) < FLOAT8_CAPABILITY:
        raise ConfigError(
            f"the KV cache is float8_e4m3fn and the GPU has compute capability {major}.{minor}, the least that "
            "converts it is 8.9: keep keys and values in bfloat16"
        )


def _launch(k: Tensor, v: Tensor, kv: Tensor, slot_mapping: Tensor) -> Launch:
    num_tokens, num_heads, head_dim = k.shape
    block_d = triton.next_power_of_2(head_dim)
    block_h = min(triton.next_power_of_2(num_heads), max(1, PROGRAM_ELEMENTS // block_d))
    return Launch(
        _kv_write_kernel,
        (num_tokens, triton.cdiv(num_heads, block_h)),
        args={
            "k_pointer": k,
            "v_pointer": v,
            "kv_pointer": kv,
            "slot_mapping": slot_mapping,
            "stride_k_token": k.stride(0),
            "stride_k_head": k.stride(1),
            "stride_v_token": v.stride(0),
            "stride_v_head": v.stride(1),
            **cache_strides(kv),
        },
        constants={
            "NUM_HEADS": num_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": kv.shape[2],
            "BLOCK_H": block_h,
            "BLOCK_D": block_d,
        },
    )


def cache_strides(kv: Tensor) -> dict[str, int]:
    """Of `kv: [blocks, 2, block_size, Hk, D]`, in elements; it is dense in D."""
    names = ("stride_block", "stride_values", "stride_slot", "stride_kv_head")
    return dict(zip(names, kv.stride(), strict=False))


@triton.jit
def slot_offset(slot_mapping, token, stride_block, stride_slot, BLOCK_SIZE: tl.constexpr):
    """Where a token of the step is kept, in elements from the layer's first. int64."""
    slot = tl.load(slot_mapping + token)
    return slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_slot


@triton.jit
def to_storage(x, dtype: tl.constexpr):
    """x in the cache's type. Saturates where there is no infinity to overflow to; NaN stays NaN."""
    if dtype == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32), -FLOAT8_MAX, FLOAT8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)


@triton.jit
def _kv_write_kernel(
    k_pointer, v_pointer, kv_pointer, slot_mapping,
    stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    stride_block, stride_values, stride_slot, stride_kv_head,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Some heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    inside = (heads < NUM_HEADS) & (dims < HEAD_DIM)
    k = tl.load(k_pointer + token * stride_k_token + heads * stride_k_head + dims, mask=inside)
    v = tl.load(v_pointer + token * stride_v_token + heads * stride_v_head + dims, mask=inside)
    at = kv_pointer + slot_offset(slot_mapping, token, stride_block, stride_slot, BLOCK_SIZE)
    at += heads * stride_kv_head + dims
    tl.store(at, to_storage(k, kv_pointer.dtype.element_ty), mask=inside)
    tl.store(at + stride_values, to_storage(v, kv_pointer.dtype.element_ty), mask=inside)


def configs() -> Iterator[KernelConfig]:
    meta = torch.device("meta")
    for head_dim in (80, 128):
        k = torch.empty(64, 8, head_dim, dtype=torch.bfloat16, device=meta)
        kv = kv_pool(64, 32, 16, 8, head_dim, torch.bfloat16, meta)[:, 0]
        slots = torch.empty(64, dtype=torch.int64, device=meta)
        yield _launch(k, k, kv, slots).config(f"kv_write-D{head_dim}-bf16")

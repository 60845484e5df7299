"""Paged attention on a GPU: each sequence goes to the kernel that suits its number of queries."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mlserve.kernels import PagedBatch, kv_pool
from mlserve.kernels.triton.attention_decode import decode_launches
from mlserve.kernels.triton.attention_prefill import prefill_launch
from mlserve.kernels.triton.configs import KernelConfig
from mlserve.kernels.triton.devices import AMPERE, HOPPER, compute_capability
from mlserve.kernels.triton.kv_cache import check_cache_type

__all__ = ["configs", "hopper_configs", "paged_attention"]


def paged_attention(
    q: Tensor,
    kv: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """See `mlserve.kernels.Ops.paged_attention`. Products are in q's type, with sums and softmax in float32.

    A mixed step runs both kernels over all its sequences. Each finds on the device which are its own, and leaves the
    rest after two loads: that needs no sorting on the host and no copy from the device, and a sequence's result is the
    same to the bit in any batch. `batch.num_decodes` spares a kernel that has nothing to do.

    Raises ConfigError for a float8_e4m3fn cache on a GPU that can't convert it.
    """
    check_cache_type(kv)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    arguments = (q, kv, batch, out, scale, window, soft_cap)
    if batch.num_decodes != 0:
        for launch in decode_launches(*arguments):
            launch.run()
    if batch.num_decodes != len(batch.context_lens):
        prefill_launch(*arguments, compute_capability(q.device)).run()
    return out.flatten(1)


def configs() -> Iterator[KernelConfig]:
    """Llama's form (a group of 4) at all head sizes and types, and Gemma's: a window, a soft cap, images in sight."""
    forms = {f"D{head_dim}-bf16": _meta_arguments(torch.bfloat16, head_dim) for head_dim in (64, 80, 96, 128, 256)}
    forms["D128-fp16"] = _meta_arguments(torch.float16, 128)
    forms["D64-fp32"] = _meta_arguments(torch.float32, 64)
    forms["D128-fp32"] = _meta_arguments(torch.float32, 128)
    forms["D256-bf16-gemma"] = _meta_arguments(torch.bfloat16, 256, window=4096, soft_cap=50.0, sees_ahead=True)
    for name, arguments in forms.items():
        decode, merge = decode_launches(*arguments)
        yield decode.config(f"decode-{name}")
        yield merge.config(f"merge-{name}")
        yield prefill_launch(*arguments, AMPERE).config(f"prefill-{name}")


def hopper_configs() -> Iterator[KernelConfig]:
    """What only Hopper and later GPUs run: wider tiles of prompts, and float8 caches (from 8.9 on)."""
    for head_dim in (80, 96, 128):
        arguments = _meta_arguments(torch.bfloat16, head_dim)
        yield prefill_launch(*arguments, HOPPER).config(f"prefill-D{head_dim}-bf16")
    yield prefill_launch(*_meta_arguments(torch.float16, 128), HOPPER).config("prefill-D128-fp16")
    float8 = _meta_arguments(torch.bfloat16, 128, kv_dtype=torch.float8_e4m3fn)
    yield prefill_launch(*float8, HOPPER).config("prefill-D128-fp8")
    yield decode_launches(*float8)[0].config("decode-D128-fp8")


def _meta_arguments(
    dtype: torch.dtype,
    head_dim: int,
    *,
    kv_dtype: torch.dtype | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sees_ahead: bool = False,
) -> tuple[Tensor, Tensor, PagedBatch, Tensor, float, int | None, float | None]:
    """Arguments of the launchers, without contents."""
    meta = torch.device("meta")

    def indices(count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int32, device=meta)

    q = torch.empty(64, 32, head_dim, dtype=dtype, device=meta)
    kv = kv_pool(64, 32, 16, 8, head_dim, kv_dtype or dtype, meta)[:, 0]
    batch = PagedBatch(
        slot_mapping=torch.empty(64, dtype=torch.int64, device=meta),
        query_starts=indices(33),
        context_lens=indices(32),
        block_table=indices(64),
        block_starts=indices(33),
        visible_ends=indices(64) if sees_ahead else None,
    )
    return q, kv, batch, torch.empty_like(q), head_dim**-0.5, window, soft_cap

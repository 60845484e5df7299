"""Paged attention on a GPU: each sequence goes to the kernel that suits its number of queries."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mlserve.kernels import PagedBatch, kv_pool
from mlserve.kernels.triton.attention_decode import decode_launches
from mlserve.kernels.triton.attention_prefill import prefill_launch
from mlserve.kernels.triton.configs import KernelConfig
from mlserve.kernels.triton.kv_cache import check_cache_type

__all__ = ["configs", "paged_attention"]


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
        prefill_launch(*arguments).run()
    return out.flatten(1)


def configs() -> Iterator[KernelConfig]:
    """Llama's form (a group of 4) at all head sizes and types, and Gemma's: a window, a soft cap, images in sight."""
    for head_dim in (64, 80, 96, 128, 256):
        yield from _forms(f"D{head_dim}-bf16", torch.bfloat16, head_dim)
    yield from _forms("D128-fp16", torch.float16, 128)
    yield from _forms("D64-fp32", torch.float32, 64)
    yield from _forms("D128-fp32", torch.float32, 128)
    yield from _forms("D256-bf16-gemma", torch.bfloat16, 256, window=4096, soft_cap=50.0, sees_ahead=True)


def _forms(
    name: str,
    dtype: torch.dtype,
    head_dim: int,
    kv_dtype: torch.dtype | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sees_ahead: bool = False,
) -> Iterator[KernelConfig]:
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
    arguments = (q, kv, batch, torch.empty_like(q), 0.125, window, soft_cap)
    decode, merge = decode_launches(*arguments)
    yield decode.config(f"decode-{name}")
    yield merge.config(f"merge-{name}")
    yield prefill_launch(*arguments).config(f"prefill-{name}")

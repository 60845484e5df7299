"""Paged attention: decoding by batch and context, prompts, chunks of them, and both in one step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache, partial

from gpu.cases import Case, Rig, Spec
from ragged import Lengths, ragged_batch
from tolerances import TRITON
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mlserve.kernels import PagedBatch, kv_pool
from mlserve.kernels.reference import ReferenceOps
from mlserve.kernels.triton.attention import paged_attention

__all__ = ["attention_specs"]

REFERENCE = ReferenceOps()
LARGEST_CHECKED = 2**24  # pairs of query and key: the reference holds some float32 matrices of them, for all heads


def attention_specs(rig: Rig) -> Iterator[Spec]:
    """All share one pool, as large as the largest batch needs; it is made for the first."""
    scale = rig.scale
    pool = cache(partial(_pool, rig))
    for context in scale.contexts:
        for batch in scale.batches:
            if batch * context <= scale.max_context_tokens:
                build = partial(_decode, rig, pool, batch, context)
                yield Spec("paged_attention", f"decode, {batch} x {context}", build)
    for tokens, context in scale.chunks:
        build = partial(_prefill, rig, pool, tokens, context)
        label = f"prefill, {tokens} of {context}"
        yield Spec("paged_attention", label, build, is_checked=tokens * context <= LARGEST_CHECKED)
    tokens, context = scale.chunks[0]
    mixed = [(tokens // 4, context), *[(1, scale.contexts[0] - i) for i in range(max(scale.batches) // 4)]]
    yield Spec(
        "paged_attention", f"mixed, {tokens // 4} and {len(mixed) - 1} decodes", partial(_mixed, rig, pool, mixed)
    )


def _pool(rig: Rig) -> Tensor:
    """Random keys and values: `[blocks, 1, 2, block_size, Hk, D]`."""
    scale, shape = rig.scale, rig.scale.shape
    tokens = max(scale.max_context_tokens, *(context for _, context in scale.chunks), 2 * scale.chunks[0][1])
    size = (tokens // scale.block_size + max(scale.batches) + 1, 1, scale.block_size, shape.kv_heads, shape.head_dim)
    return kv_pool(*size, rig.dtype, rig.device).normal_()


def _decode(rig: Rig, pool: Callable[[], Tensor], batch: int, context: int) -> Case:
    case, q = _case(rig, pool, [(1, context)] * batch)
    k, v = _dense_keys(rig, pool(), batch, context)
    dense = partial(scaled_dot_product_attention, q[:, :, None], k, v, enable_gqa=True)  # q: [batch, Hq, 1, D]
    return dataclasses.replace(case, peers={"SDPA": dense})


def _prefill(rig: Rig, pool: Callable[[], Tensor], tokens: int, context: int) -> Case:
    case, q = _case(rig, pool, [(tokens, context)])
    if tokens < context:  # SDPA's causal mask is aligned to the first key
        return case
    k, v = _dense_keys(rig, pool(), 1, context)
    dense = partial(scaled_dot_product_attention, q.transpose(0, 1)[None], k, v, is_causal=True, enable_gqa=True)
    return dataclasses.replace(case, peers={"SDPA": dense})


def _mixed(rig: Rig, pool: Callable[[], Tensor], lengths: Lengths) -> Case:
    return _case(rig, pool, lengths)[0]


def _case(rig: Rig, pool: Callable[[], Tensor], lengths: Lengths) -> tuple[Case, Tensor]:
    """The case, and its q: `[T, Hq, D]`, a view of a fused qkv matrix."""
    shape, layer = rig.scale.shape, pool()[:, 0]
    batch = _on_device(rig, lengths)
    queries, contexts = zip(*lengths, strict=True)
    q = rig.randn(sum(queries), shape.heads + 2 * shape.kv_heads, shape.head_dim)[:, : shape.heads]
    arguments = (q, layer, batch)
    scale = shape.head_dim**-0.5
    case = Case(
        run=partial(paged_attention, *arguments, scale=scale),
        expected=partial(REFERENCE.paged_attention, *arguments, scale=scale),
        cost=shape.attention(queries, contexts),
        tolerance=TRITON[rig.dtype],
    )
    return case, q


def _on_device(rig: Rig, lengths: Lengths) -> PagedBatch:
    batch, _ = ragged_batch(lengths, rig.scale.block_size)
    tensors = {
        field.name: value.to(rig.device)
        for field in dataclasses.fields(batch)
        if isinstance(value := getattr(batch, field.name), Tensor)
    }
    num_decodes = sum(queries == 1 for queries, _ in lengths)
    return dataclasses.replace(batch, **tensors, num_decodes=num_decodes)


def _dense_keys(rig: Rig, pool: Tensor, batch: int, context: int) -> tuple[Tensor, Tensor]:
    """What SDPA takes, `[batch, Hk, context, D]` each, over the pool's own memory: other numbers, as many bytes."""
    shape = rig.scale.shape
    size = batch * context * shape.kv_heads * shape.head_dim
    parts = pool.flatten()[: 2 * size].view(2, batch, context, shape.kv_heads, shape.head_dim)
    k, v = parts.transpose(2, 3).unbind(0)
    return k, v

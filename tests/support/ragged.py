"""Batches of ragged sequences over scattered blocks, as kernels see them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from mlserve.kernels import PagedBatch

Lengths = Sequence[tuple[int, int]]  # (tokens of this step, context with them) of each sequence


def ragged_batch(lengths: Lengths, block_size: int) -> tuple[PagedBatch, int]:
    """The batch, and the number of blocks in a pool for it; blocks are handed out at random and never block 0."""
    blocks = [-(-context // block_size) for _, context in lengths]
    table = torch.randperm(sum(blocks)).int() + 1
    block_starts = torch.tensor([0, *blocks]).cumsum(0).int()
    slots = [
        table[block_starts[s] + position // block_size].long() * block_size + position % block_size
        for s, (queries, context) in enumerate(lengths)
        for position in range(context - queries, context)
    ]
    batch = PagedBatch(
        slot_mapping=torch.stack(slots),
        query_starts=torch.tensor([0, *(queries for queries, _ in lengths)]).cumsum(0).int(),
        context_lens=torch.tensor([context for _, context in lengths]).int(),
        block_table=table,
        block_starts=block_starts,
    )
    return batch, sum(blocks) + 1


def context_slots(batch: PagedBatch, sequence: int, block_size: int, first: int = 0) -> Tensor:
    """Slots of a sequence's tokens [first, context), in order."""
    start, end = batch.block_starts[sequence : sequence + 2].tolist()
    positions = torch.arange(first, int(batch.context_lens[sequence]))
    blocks = batch.block_table[start:end].long()[positions // block_size]
    return blocks * block_size + positions % block_size


def layer_of_pool(
    batch: PagedBatch,
    num_blocks: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    window: int | None = None,
) -> Tensor:
    """One layer of a pool of three: NaN, but for the tokens that some query of the batch sees."""
    pool = torch.full((num_blocks, 3, 2, block_size, kv_heads, head_dim), torch.nan, dtype=dtype)
    layer = pool[:, 1]
    query_lens = batch.query_starts.diff().tolist()
    for s, context in enumerate(batch.context_lens.tolist()):
        first = 0 if window is None else max(0, context - query_lens[s] - window + 1)
        slots = context_slots(batch, s, block_size, first)
        layer[slots // block_size, :, slots % block_size] = torch.randn(len(slots), 2, kv_heads, head_dim).to(dtype)
    return layer


def visible_ends(batch: PagedBatch, span: int) -> Tensor:
    """Each query sees up to the end of its run of `span` positions, or of its context."""
    query_lens = batch.query_starts.diff().tolist()
    ends = []
    for queries, context in zip(query_lens, batch.context_lens.tolist(), strict=True):
        positions = torch.arange(context - queries, context)
        ends.append(((positions // span + 1) * span).clamp(max=context))
    return torch.cat(ends).int()


def sequence_alone(batch: PagedBatch, sequence: int) -> PagedBatch:
    """One sequence of a batch as a batch of its own. Its rows are [query_starts[s], query_starts[s + 1])."""
    rows = slice(*batch.query_starts[sequence : sequence + 2].tolist())
    blocks = slice(*batch.block_starts[sequence : sequence + 2].tolist())
    return dataclasses.replace(
        batch,
        slot_mapping=batch.slot_mapping[rows],
        query_starts=batch.query_starts[sequence : sequence + 2] - rows.start,
        context_lens=batch.context_lens[sequence : sequence + 1],
        block_table=batch.block_table[blocks],
        block_starts=batch.block_starts[sequence : sequence + 2] - blocks.start,
        visible_ends=None if batch.visible_ends is None else batch.visible_ends[rows],
    )

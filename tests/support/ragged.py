"""Batches of ragged sequences over scattered blocks, as kernels see them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

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


def context_slots(batch: PagedBatch, sequence: int, block_size: int, first: int = 0) -> torch.Tensor:
    """Slots of a sequence's tokens [first, context), in order."""
    start, end = batch.block_starts[sequence : sequence + 2].tolist()
    positions = torch.arange(first, int(batch.context_lens[sequence]))
    blocks = batch.block_table[start:end].long()[positions // block_size]
    return blocks * block_size + positions % block_size

"""Drives a decoder as the engine would, one step at a time, without scheduler or cache."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mlserve.adapters.linear import StepAdapters
from mlserve.adapters.segments import AdapterRows, SlotRange
from mlserve.adapters.slots import AdapterSlots
from mlserve.kernels import PagedBatch, kv_pool
from mlserve.model.decoder import Decoder
from mlserve.model.inputs import ForwardBatch


@dataclass
class PagedSequence:
    """Token ids, how many of them are in the cache, the blocks that hold them, and the adapter that acts on them."""

    ids: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    adapter_slot: int | None = None
    adapter_start: int = 0


class PagedRun:
    """A KV pool filled with NaN, so that whoever reads what was not written shows; blocks are handed out at random."""

    def __init__(
        self, decoder: Decoder, *, block_size: int = 4, num_blocks: int = 128, adapters: AdapterSlots | None = None
    ) -> None:
        config = decoder.config
        self.decoder = decoder
        self.adapters = adapters
        self.block_size = block_size
        self.kv = kv_pool(
            num_blocks,
            config.num_layers,
            block_size,
            config.num_kv_heads,
            config.head_dim,
            torch.float32,
            decoder.device,
        ).fill_(torch.nan)
        self.free = list(range(1, num_blocks))
        random.Random(0).shuffle(self.free)

    @torch.inference_mode()
    def step(self, chunks: Sequence[tuple[PagedSequence, int]], rows: Sequence[int] | None = None) -> Tensor:
        """Compute the next `count` tokens of each sequence; logits `[R, V]` of `rows`, by default of all tokens."""
        batch = self._batch(chunks, rows)
        hidden = self.decoder.forward(batch, self.kv)
        return self.decoder.logits(hidden, batch.logit_adapters)

    def prefill(
        self, ids: Sequence[int], adapter_slot: int | None = None, adapter_start: int = 0
    ) -> tuple[PagedSequence, Tensor]:
        """A new sequence, computed in one step: the sequence and the logits of all its tokens."""
        sequence = PagedSequence(list(ids), adapter_slot=adapter_slot, adapter_start=adapter_start)
        return sequence, self.step([(sequence, len(ids))])

    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        """The `count` likeliest tokens after a prompt, one after the other."""
        sequence, logits = self.prefill(ids)
        for _ in range(count - 1):
            sequence.ids.append(int(logits[-1].argmax()))
            logits = self.step([(sequence, 1)])
        return [*sequence.ids[len(ids) :], int(logits[-1].argmax())]

    def _batch(self, chunks: Sequence[tuple[PagedSequence, int]], rows: Sequence[int] | None) -> ForwardBatch:
        token_ids, positions, slots, starts, block_starts, table = [], [], [], [0], [0], []
        adapted = []
        for sequence, count in chunks:
            end = sequence.computed + count
            while len(sequence.blocks) * self.block_size < end:
                sequence.blocks.append(self.free.pop())
            span = range(sequence.computed, end)
            token_ids += sequence.ids[span.start : span.stop]
            positions += span
            slots += [sequence.blocks[p // self.block_size] * self.block_size + p % self.block_size for p in span]
            starts.append(starts[-1] + count)
            table += sequence.blocks
            block_starts.append(len(table))
            first = max(starts[-1] - end + sequence.adapter_start, starts[-2])  # row that the adapter acts on
            if sequence.adapter_slot is not None and first < starts[-1]:
                adapted.append(SlotRange(sequence.adapter_slot, first, starts[-1]))
            sequence.computed = end
        contexts = [sequence.computed for sequence, _ in chunks]
        wanted = list(range(len(token_ids))) if rows is None else list(rows)
        adapters = logit_adapters = None
        if adapted:
            assert self.adapters is not None
            adapters = StepAdapters(self.adapters, self.decoder.ops, AdapterRows.of_ranges(adapted))
            logit_adapters = adapters.select(wanted)
        with self.decoder.device:
            paged = PagedBatch(
                slot_mapping=torch.tensor(slots),
                query_starts=torch.tensor(starts, dtype=torch.int32),
                context_lens=torch.tensor(contexts, dtype=torch.int32),
                block_table=torch.tensor(table, dtype=torch.int32),
                block_starts=torch.tensor(block_starts, dtype=torch.int32),
            )
            logit_rows = torch.tensor(wanted, dtype=torch.int64)
            ids = torch.tensor(token_ids)
            return ForwardBatch(ids, torch.tensor(positions), paged, logit_rows, adapters, logit_adapters)

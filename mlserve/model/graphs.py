"""Decode steps as graphs: launched once as a whole, in place of some hundred kernels one by one.

A graph repeats what was captured over the same memory, so a step is padded to one of few batch sizes, and its inputs
are copied to where the graph reads them. Padded rows are sequences of one token of the base model whose keys and values
go to block 0, which no sequence ever has.

    graph of 4:   token_ids [t0 t1 t2  0]   context_lens [9 30 4  1]   block_table [3 7 2 8 | 5 | 0 | not read ...]
                   three sequences  padding                                 theirs           padding

Adapters are in the graph: all slots, by segments that may be empty, over all linears that have memory. Once an adapter
brings memory for another linear, graphs with adapters are captured anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mlserve.adapters.slots import AdapterSlots, Projection
from mlserve.model.decoder import Decoder
from mlserve.model.inputs import ForwardBatch, StepInputs, upload
from mlserve.model.staging import Staged

__all__ = ["CudaGraphRecorder", "DecodeGraphs", "GraphOptions", "GraphRecorder", "padded_sizes"]

# A step over more tokens of context than this isn't captured: to read their keys and values takes so long (128 GB of
# Llama-3-8B's) that launching kernels costs nothing beside it. It bounds the block table, and scratch memory with it.
MAX_CONTEXT_TOKENS = 2**20
_INPUT_BYTES_PER_ROW = 128  # without the block table; some 90 are used
_INPUT_BYTES = 4096  # what doesn't grow with rows: padding between arrays

Replay = Callable[[], None]


class GraphRecorder(Protocol):
    """Makes graphs."""

    def capture(self, work: Callable[[], None]) -> Replay:
        """Make a graph of what `work` does on the device; returns what runs it, over the same memory each time.

        `work` itself runs as often as that takes, so it must be harmless to repeat.
        """
        ...


class CudaGraphRecorder:
    """CUDA graphs. All share one pool of memory, since only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, work: Callable[[], None]) -> Replay:
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()  # kernels are compiled and libraries take their workspaces, which no capture may do
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Threads that read adapters take page-locked memory meanwhile, which otherwise would spoil the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        replay: Replay = graph.replay
        return replay


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """How decode steps are captured."""

    recorder: GraphRecorder
    max_num_seqs: int  # steps of more sequences aren't
    max_model_len: int  # tokens of the longest sequence


class DecodeGraphs:
    """Runs decode steps as graphs, each captured when a step first needs it: at most two for each batch size."""

    def __init__(
        self, decoder: Decoder, kv: Tensor, block_size: int, slots: AdapterSlots, options: GraphOptions
    ) -> None:
        """`kv: [blocks, layers, 2, block_size, Hk, D]`, whose block 0 nobody reads."""
        self._decoder = decoder
        self._kv = kv
        self._slots = slots
        self._recorder = options.recorder
        self._sizes = padded_sizes(options.max_num_seqs)
        self._most_blocks = -(-MAX_CONTEXT_TOKENS // block_size)
        self._blocks_per_sequence = -(-options.max_model_len // block_size)
        self._has_sections = any(rope.sections is not None for rope in decoder.config.ropes)
        largest = self._sizes[-1]
        num_bytes = _INPUT_BYTES + _INPUT_BYTES_PER_ROW * largest + 16 * slots.num_slots + 4 * self._capacity(largest)
        self._uploads = Staged(decoder.device, num_bytes, may_grow=False)
        self._logits = torch.zeros(largest, decoder.config.vocab_size, device=decoder.device)
        self._graphs: dict[tuple[int, frozenset[Projection]], Replay] = {}

    def logits(self, inputs: StepInputs) -> Tensor | None:
        """Run a step: `[R, V]` float32, which the next call overwrites. None, and nothing is done, if it can't be one.

        It must be of single tokens, no more than were provided for, without an image's embeddings. Not captured are
        adapters with DoRA: which rows are rescaled, and how many, differs from step to step.
        """
        size = self._size_of(inputs)
        if size is None:
            return None
        layout = frozenset[Projection]() if inputs.adapter_rows is None else self._slots.layout
        replay = self._graphs.get((size, layout))
        padded = _padded(inputs, size, self._has_sections)
        if replay is None:
            replay = self._capture(padded, size, layout)
        else:
            self._upload(padded, size)
        replay()
        num_rows = len(inputs.token_ids)
        logits = self._logits[:num_rows]
        return logits if len(inputs.logit_rows) == num_rows else logits[self._slots.put(inputs.logit_rows)]

    def _size_of(self, inputs: StepInputs) -> int | None:
        """The batch size that a step is padded to; None if it isn't one for a graph."""
        num_rows, rows = len(inputs.token_ids), inputs.adapter_rows
        if not inputs.only_decodes or num_rows > self._sizes[-1]:
            return None
        if rows is not None and self._slots.with_dora(frozenset(rows.slots.tolist())):
            return None
        size = next(size for size in self._sizes if size >= num_rows)
        return size if len(inputs.block_table) + size - num_rows <= self._capacity(size) else None

    def _capacity(self, size: int) -> int:
        """Length of the block table that a graph is captured with."""
        return max(size, min(size * self._blocks_per_sequence, self._most_blocks))

    def _capture(self, padded: StepInputs, size: int, layout: frozenset[Projection]) -> Replay:
        if layout:  # graphs of an earlier layout would never be used again
            self._graphs = {key: graph for key, graph in self._graphs.items() if key[1] in (frozenset(), layout)}
        unused = self._capacity(size) - len(padded.block_table)
        batch = self._upload(replace(padded, block_table=np.pad(padded.block_table, (0, unused))), size)
        replay = self._recorder.capture(partial(self._run, batch))
        self._graphs[size, layout] = replay
        return replay

    def _upload(self, padded: StepInputs, size: int) -> ForwardBatch:
        """Copy a step's inputs to where the graphs of that size read them."""
        batch = upload(padded, self._uploads, self._slots, self._decoder.ops, padded_adapter_rows=size)
        self._uploads.send()
        return batch

    def _run(self, batch: ForwardBatch) -> None:
        hidden = self._decoder.forward(batch, self._kv)
        self._logits[: len(hidden)] = self._decoder.logits(hidden, batch.logit_adapters)


def padded_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes that graphs are captured for: close enough that a step wastes little, and few.

    1, 2, 4, from there in eights, from 256 in 64s. The last is `max_num_seqs`.
    """
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, max_num_seqs, 64)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


def _padded(inputs: StepInputs, size: int, has_sections: bool) -> StepInputs:
    """A step of `size` sequences with a token each, all of whose logits are wanted.

    A query of one token sees its own context and nothing beyond it, so no `visible_ends` are needed.
    """
    num_rows = len(inputs.token_ids)
    extra = size - num_rows
    own = inputs.positions if inputs.positions.ndim == 1 else inputs.positions[0]
    positions = np.broadcast_to(inputs.positions, (3, num_rows)) if has_sections else own
    ends = np.arange(1, extra + 1, dtype=np.int32) + inputs.block_starts[-1]
    return replace(
        inputs,
        token_ids=np.pad(inputs.token_ids, (0, extra)),
        positions=np.pad(positions, ((0, 0), (0, extra)) if has_sections else (0, extra)),
        logit_rows=np.arange(size),
        slot_mapping=np.pad(inputs.slot_mapping, (0, extra)),
        query_starts=np.arange(size + 1, dtype=np.int32),
        context_lens=np.pad(inputs.context_lens, (0, extra), constant_values=1),
        block_table=np.pad(inputs.block_table, (0, extra)),
        block_starts=np.concatenate([inputs.block_starts, ends]),
        visible_ends=None,
        num_decodes=size,
    )

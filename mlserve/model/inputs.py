"""One step's input: its integers in host memory, and the same as tensors on the device."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlserve.adapters.linear import StepAdapters
from mlserve.adapters.segments import AdapterRows, SlotRange
from mlserve.adapters.slots import AdapterSlots
from mlserve.kernels import Ops, PagedBatch
from mlserve.model.plan import PlannedSequence, SequenceT, StepPlan
from mlserve.model.staging import Uploads
from mlserve.vision.placement import Chunk, PlacedImage

__all__ = ["ForwardBatch", "ImageRows", "StepInputs", "image_pieces", "image_rows", "step_inputs", "upload"]

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Rows of a step that get an image's embeddings in place of their tokens'."""

    rows: Tensor  # [M] int64
    embeddings: Tensor  # [M, H]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """All tokens of one step, prefill and decode mixed, sequences one after the other. An argument, never a global."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, or [3, T] if some stand at a frame, row and column (M-RoPE)
    paged: PagedBatch
    logit_rows: Tensor  # [R] int64: rows of [0, T) whose logits are wanted
    adapters: StepAdapters | None = None  # None: no adapter acts on any row
    logit_adapters: StepAdapters | None = None  # the same for the matrix of the logit rows
    images: ImageRows | None = None  # None: no image's embeddings stand in any row


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """One step's integers in host memory. Arrays are those of `ForwardBatch` and `PagedBatch`."""

    token_ids: Int64s
    positions: Int64s
    logit_rows: Int64s
    slot_mapping: Int64s
    query_starts: Int32s
    context_lens: Int32s
    block_table: Int32s
    block_starts: Int32s
    visible_ends: Int32s | None
    num_decodes: int
    adapter_rows: AdapterRows | None  # None: no adapter acts on any row

    @property
    def only_decodes(self) -> bool:
        """Whether each sequence has one token."""
        return self.num_decodes == len(self.token_ids)


def step_inputs(plan: StepPlan[SequenceT], logit_rows: Sequence[int], block_size: int) -> StepInputs:
    """Lay a plan's sequences out one after the other. `logit_rows` index the step's tokens, ascending, each once."""
    token_ids, positions, slots = array("q"), array("q"), array("q")
    for sequence, query_len in zip(plan.sequences, plan.query_lens, strict=True):
        if query_len == 1:
            position = sequence.num_computed
            token_ids.append(sequence.token_ids[position])
            positions.append(position)
            slots.append(sequence.block_table[position // block_size] * block_size + position % block_size)
        else:
            _append_chunk(sequence, query_len, block_size, token_ids, positions, slots)
    tables = [sequence.block_table for sequence in plan.sequences]
    context_lens = [s.num_computed + n for s, n in zip(plan.sequences, plan.query_lens, strict=True)]
    indices = np.frombuffer(positions, dtype=np.int64)
    return StepInputs(
        token_ids=np.frombuffer(token_ids, dtype=np.int64),
        positions=_rope_positions(plan, indices),
        logit_rows=np.array(logit_rows, dtype=np.int64),
        slot_mapping=np.frombuffer(slots, dtype=np.int64),
        query_starts=np.array([0, *accumulate(plan.query_lens)], dtype=np.int32),
        context_lens=np.array(context_lens, dtype=np.int32),
        block_table=np.frombuffer(bytearray().join(tables), dtype=np.int32),
        block_starts=np.array([0, *accumulate(map(len, tables))], dtype=np.int32),
        visible_ends=_visible_ends(plan, indices),
        num_decodes=plan.query_lens.count(1),
        adapter_rows=_adapter_rows(plan),
    )


def upload(
    inputs: StepInputs,
    uploads: Uploads,
    slots: AdapterSlots,
    ops: Ops,
    images: ImageRows | None = None,
    *,
    padded_adapter_rows: int | None = None,
) -> ForwardBatch:
    """Put a step's inputs on the device; the caller sends them. The block table is the last.

    padded_adapter_rows: the `padded_rows` of `StepAdapters`.
    """
    put, visible_ends = uploads.put, inputs.visible_ends
    adapters = logit_adapters = None
    if inputs.adapter_rows is not None:
        adapters = StepAdapters(slots, ops, inputs.adapter_rows, put, padded_rows=padded_adapter_rows)
        logit_adapters = adapters
        if len(inputs.logit_rows) < len(inputs.token_ids):  # decoding wants all rows: the same once more
            logit_adapters = adapters.select(inputs.logit_rows, put)
    return ForwardBatch(
        token_ids=put(inputs.token_ids),
        positions=put(inputs.positions),
        logit_rows=put(inputs.logit_rows),
        paged=PagedBatch(
            slot_mapping=put(inputs.slot_mapping),
            query_starts=put(inputs.query_starts),
            context_lens=put(inputs.context_lens),
            block_starts=put(inputs.block_starts),
            visible_ends=None if visible_ends is None else put(visible_ends),
            num_decodes=inputs.num_decodes,
            block_table=put(inputs.block_table),
        ),
        adapters=adapters,
        logit_adapters=logit_adapters,
        images=images,
    )


def _visible_ends(plan: StepPlan[SequenceT], positions: Int64s) -> Int32s | None:
    if not any(sequence.whole_ranges for sequence in plan.sequences):
        return None
    ends = positions.astype(np.int32) + 1
    begin = 0
    for sequence, query_len in zip(plan.sequences, plan.query_lens, strict=True):
        computed = sequence.num_computed
        for first, last in sequence.whole_ranges:
            low, high = max(first - computed, 0), min(last - computed, query_len)
            if low < high:
                ends[begin + low : begin + high] = last
        begin += query_len
    return ends


def _rope_positions(plan: StepPlan[SequenceT], indices: Int64s) -> Int64s:
    """`[T]` as they are, or `[3, T]` if a sequence has positions of its own."""
    if all(sequence.rope_positions is None for sequence in plan.sequences):
        return indices
    positions = np.tile(indices, (3, 1))
    begin = 0
    for sequence, query_len in zip(plan.sequences, plan.query_lens, strict=True):
        own, computed = sequence.rope_positions, sequence.num_computed
        if own is not None:
            positions[:, begin : begin + query_len] = own.chunk(computed, computed + query_len)
        begin += query_len
    return positions


def _adapter_rows(plan: StepPlan[SequenceT]) -> AdapterRows | None:
    """Each sequence's tokens from its `adapter_start` on."""
    ranges, end = [], 0
    for sequence, query_len in zip(plan.sequences, plan.query_lens, strict=True):
        end += query_len
        if sequence.adapter_slot is not None:
            num_adapted = min(query_len, sequence.num_computed + query_len - sequence.adapter_start)
            if num_adapted > 0:
                ranges.append(SlotRange(sequence.adapter_slot, end - num_adapted, end))
    return AdapterRows.of_ranges(ranges) if ranges else None


def image_pieces(plan: StepPlan[SequenceT]) -> list[tuple[PlacedImage, Chunk]]:
    """The images whose embeddings stand in a plan's rows, and which of them; `Chunk.start` is a row of the step."""
    pieces, begin = [], 0
    for sequence, query_len in zip(plan.sequences, plan.query_lens, strict=True):
        computed = sequence.num_computed
        for image in sequence.images:
            for chunk in image.chunks(computed, computed + query_len):
                pieces.append((image, replace(chunk, start=chunk.start - computed + begin)))
        begin += query_len
    return pieces


def image_rows(
    pieces: Sequence[tuple[PlacedImage, Chunk]], embeddings: Mapping[bytes, Tensor], uploads: Uploads
) -> ImageRows:
    """Lay out what `image_pieces` found; `embeddings: [n, H]` by the images' keys, on the device."""
    rows = [np.arange(chunk.start, chunk.start + chunk.last - chunk.first) for _, chunk in pieces]
    parts = [embeddings[image.key][chunk.first : chunk.last] for image, chunk in pieces]
    return ImageRows(uploads.put(np.concatenate(rows)), torch.cat(parts))


def _append_chunk(
    sequence: PlannedSequence,
    query_len: int,
    block_size: int,
    token_ids: array[int],
    positions: array[int],
    slots: array[int],
) -> None:
    start = sequence.num_computed
    token_ids.extend(sequence.token_ids[start : start + query_len])
    chunk = np.arange(start, start + query_len, dtype=np.int64)
    table = np.frombuffer(sequence.block_table, dtype=np.int32).astype(np.int64)
    positions.frombytes(chunk.tobytes())
    slots.frombytes((table[chunk // block_size] * block_size + chunk % block_size).tobytes())

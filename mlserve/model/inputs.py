"""One step's input as tensors."""

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
from mlserve.vision.placement import Chunk, PlacedImage

__all__ = ["ForwardBatch", "ImageRows", "build_batch", "image_pieces", "image_rows", "step_adapters"]


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


def build_batch(
    plan: StepPlan[SequenceT],
    logit_rows: Sequence[int],
    block_size: int,
    device: torch.device,
    adapters: StepAdapters | None = None,
    images: ImageRows | None = None,
) -> ForwardBatch:
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

    def int64(values: array[int]) -> Tensor:
        return torch.from_numpy(np.frombuffer(values, dtype=np.int64)).to(device, non_blocking=True)

    def int32(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32).to(device, non_blocking=True)

    block_table = np.frombuffer(bytearray().join(tables), dtype=np.int32)
    paged = PagedBatch(
        slot_mapping=int64(slots),
        query_starts=int32([0, *accumulate(plan.query_lens)]),
        context_lens=int32(context_lens),
        block_table=torch.from_numpy(block_table).to(device, non_blocking=True),
        block_starts=int32([0, *accumulate(map(len, tables))]),
        visible_ends=_visible_ends(plan, positions, device),
        num_decodes=plan.query_lens.count(1),
    )
    rows = torch.tensor(logit_rows, dtype=torch.int64).to(device, non_blocking=True)
    logit_adapters = adapters
    if adapters is not None and len(logit_rows) < len(token_ids):  # decoding wants all rows: the same once more
        logit_adapters = adapters.select(logit_rows)
    at = _rope_positions(plan, np.frombuffer(positions, dtype=np.int64))
    at_device = torch.from_numpy(at).to(device, non_blocking=True)
    return ForwardBatch(int64(token_ids), at_device, paged, rows, adapters, logit_adapters, images)


def _visible_ends(plan: StepPlan[SequenceT], positions: array[int], device: torch.device) -> Tensor | None:
    if not any(sequence.whole_ranges for sequence in plan.sequences):
        return None
    ends = np.frombuffer(positions, dtype=np.int64).astype(np.int32) + 1
    begin = 0
    for sequence, query_len in zip(plan.sequences, plan.query_lens, strict=True):
        computed = sequence.num_computed
        for first, last in sequence.whole_ranges:
            low, high = max(first - computed, 0), min(last - computed, query_len)
            if low < high:
                ends[begin + low : begin + high] = last
        begin += query_len
    return torch.from_numpy(ends).to(device, non_blocking=True)


def _rope_positions(plan: StepPlan[SequenceT], indices: NDArray[np.int64]) -> NDArray[np.int64]:
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


def image_rows(pieces: Sequence[tuple[PlacedImage, Chunk]], embeddings: Mapping[bytes, Tensor]) -> ImageRows:
    """Lay out what `image_pieces` found; `embeddings: [n, H]` by the images' keys."""
    device = next(iter(embeddings.values())).device
    rows = [torch.arange(chunk.start, chunk.start + chunk.last - chunk.first) for _, chunk in pieces]
    parts = [embeddings[image.key][chunk.first : chunk.last] for image, chunk in pieces]
    return ImageRows(torch.cat(rows).to(device), torch.cat(parts))


def step_adapters(plan: StepPlan[SequenceT], slots: AdapterSlots, ops: Ops) -> StepAdapters | None:
    """The adapters of a plan's tokens: each sequence's from its `adapter_start` on. None if there are none."""
    ranges, end = [], 0
    for sequence, query_len in zip(plan.sequences, plan.query_lens, strict=True):
        end += query_len
        if sequence.adapter_slot is not None:
            num_adapted = min(query_len, sequence.num_computed + query_len - sequence.adapter_start)
            if num_adapted > 0:
                ranges.append(SlotRange(sequence.adapter_slot, end - num_adapted, end))
    return StepAdapters(slots, ops, AdapterRows.of_ranges(ranges)) if ranges else None


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

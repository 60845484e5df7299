"""One step's input as tensors."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from mlserve.kernels import PagedBatch
from mlserve.model.plan import PlannedSequence, SequenceT, StepPlan

__all__ = ["ForwardBatch", "build_batch"]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """All tokens of one step, prefill and decode mixed, sequences one after the other. An argument, never a global."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    paged: PagedBatch
    logit_rows: Tensor  # [R] int64: rows of [0, T) whose logits are wanted


def build_batch(
    plan: StepPlan[SequenceT], logit_rows: Sequence[int], block_size: int, device: torch.device
) -> ForwardBatch:
    """Lay a plan's sequences out one after the other. `logit_rows` index the step's tokens."""
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
    )
    rows = torch.tensor(logit_rows, dtype=torch.int64).to(device, non_blocking=True)
    return ForwardBatch(int64(token_ids), int64(positions), paged, rows)


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

"""Changes that a request makes to its logits before a token is chosen: penalties, biases, masks.

In this order: repetition penalty (Keskar et al. 2019, CTRL), frequency and presence penalties (OpenAI's definition),
bias, then what is not allowed. Each touches only the tokens that it names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from mlserve.model.plan import SamplingRow

__all__ = ["edited_logits", "is_edited"]


def is_edited(row: SamplingRow) -> bool:
    """Whether the row's next logits are changed at all."""
    p = row.params
    return bool(
        p.repetition_penalty != 1.0
        or p.presence_penalty
        or p.frequency_penalty
        or p.min_tokens > len(row.token_ids) - row.num_prompt_tokens
        or p.logit_bias
        or row.bad_words_ids
        or p.allowed_token_ids is not None
        or row.matcher is not None
    )


def edited_logits(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Apply each row's changes to `logits: [E, V]` float32, in place; returns it."""
    _penalise_repetition(logits, rows)
    _penalise_occurrence(logits, rows)
    _add_bias(logits, rows)
    for i, row in enumerate(rows):
        if row.params.allowed_token_ids is not None:
            allowed = torch.tensor(row.params.allowed_token_ids, device=logits.device)
            kept = logits[i, allowed]
            logits[i] = -math.inf
            logits[i, allowed] = kept
    _ban(logits, rows)
    return logits


def _penalise_repetition(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Prompt and output tokens: positive logits are divided by the penalty, negative ones multiplied."""
    at = _Cells()
    penalties: list[float] = []
    for i, row in enumerate(rows):
        penalty = row.params.repetition_penalty
        if penalty != 1.0:
            seen = set(row.token_ids)
            at.add(i, seen)
            penalties += [penalty] * len(seen)
    if penalties:
        index, by = at.on(logits.device), torch.tensor(penalties, dtype=logits.dtype, device=logits.device)
        values = logits[index]
        logits[index] = torch.where(values > 0, values / by, values * by)


def _penalise_occurrence(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Output tokens: the presence penalty once, the frequency penalty for each time."""
    at = _Cells()
    penalties: list[float] = []
    for i, row in enumerate(rows):
        p = row.params
        if p.presence_penalty or p.frequency_penalty:
            tokens, counts = np.unique(np.array(row.token_ids[row.num_prompt_tokens :], np.int64), return_counts=True)
            at.add(i, tokens.tolist())
            penalties += (p.presence_penalty + p.frequency_penalty * counts).tolist()
    if penalties:
        logits[at.on(logits.device)] -= torch.tensor(penalties, dtype=logits.dtype, device=logits.device)


def _add_bias(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    at = _Cells()
    biases: list[float] = []
    for i, row in enumerate(rows):
        at.add(i, row.params.logit_bias)
        biases += row.params.logit_bias.values()
    if biases:
        logits[at.on(logits.device)] += torch.tensor(biases, dtype=logits.dtype, device=logits.device)


def _ban(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    at, vocab_size = _Cells(), logits.shape[1]
    for i, row in enumerate(rows):
        at.add(i, [token for token in _banned(row) if token < vocab_size])  # a tokenizer may know more than the model
    if at.columns:
        logits[at.on(logits.device)] = -math.inf


def _banned(row: SamplingRow) -> Iterator[int]:
    if len(row.token_ids) - row.num_prompt_tokens < row.params.min_tokens:
        yield from row.banned_until_min
    for *start, last in row.bad_words_ids:
        if not start or row.token_ids[-len(start) :] == start:
            yield last


class _Cells:
    """Places in a matrix, as one index for all of them."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.columns: list[int] = []

    def add(self, row: int, columns: Iterable[int]) -> None:
        before = len(self.columns)
        self.columns += columns
        self.rows += [row] * (len(self.columns) - before)

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.rows, device=device), torch.tensor(self.columns, device=device)

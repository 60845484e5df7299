"""Log-probabilities of tokens under the model's own distribution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlserve.model.staging import fetch, place
from mlserve.request import TokenLogprob

__all__ = ["prompt_logprobs", "row_logprobs", "token_logprobs"]

ROWS_AT_ONCE = 32  # bounds the log-softmax: 20 MB for 150k tokens


def prompt_logprobs(logits: Tensor, next_ids: Sequence[int], top: int) -> list[TokenLogprob]:
    """Of each prompt token that follows a row, and of the `top` likeliest ones in its place.

    `logits: [N, V]` float32, row i predicting `next_ids[i]`.
    """
    if not next_ids:
        return []
    ids = place(np.array(next_ids, dtype=np.int64), logits.device)
    return token_logprobs(next_ids, [top] * len(next_ids), *fetch(*row_logprobs(logits, ids, top)))


def row_logprobs(logits: Tensor, ids: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Those of `ids: [N]` under the rows of `logits: [N, V]` float32, `[N]`; then each row's `top` likeliest tokens and
    their log-probabilities, `[N, top]` each, all still on the device. There must be rows."""
    top = min(top, logits.shape[1])
    parts = []
    for start in range(0, len(ids), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        logprobs = logits[rows].log_softmax(-1)
        values, tokens = logprobs.topk(top)
        parts.append((logprobs.gather(1, ids[rows, None])[:, 0], tokens, values))
    chosen, likeliest, values = map(torch.cat, zip(*parts, strict=True))
    return chosen, likeliest, values


def token_logprobs(
    ids: Sequence[int],
    tops: Sequence[int],
    chosen: NDArray[np.float32],
    tokens: NDArray[np.int64],
    values: NDArray[np.float32],
) -> list[TokenLogprob]:
    """What `row_logprobs` found for `ids`, of which row i gets the `tops[i]` likeliest."""
    rows = zip(ids, chosen.tolist(), tokens.tolist(), values.tolist(), tops, strict=True)
    return [
        TokenLogprob(token, value, tuple(zip(likeliest[:top], their_values[:top], strict=True)))
        for token, value, likeliest, their_values, top in rows
    ]

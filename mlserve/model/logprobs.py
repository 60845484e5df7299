"""Log-probabilities of tokens under the model's own distribution."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mlserve.request import TokenLogprob

__all__ = ["prompt_logprobs", "token_logprobs"]

ROWS_AT_ONCE = 32  # bounds the log-softmax: 20 MB for 150k tokens


def prompt_logprobs(logits: Tensor, next_ids: Sequence[int], top: int) -> list[TokenLogprob]:
    """Of each prompt token that follows a row, and of the `top` likeliest ones in its place.

    `logits: [N, V]` float32, row i predicting `next_ids[i]`.
    """
    return token_logprobs(logits, next_ids, [top] * len(next_ids))


def token_logprobs(logits: Tensor, ids: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    """Of `ids[i]` under row i of `logits: [N, V]` float32, and of that row's `tops[i]` likeliest tokens."""
    found = []
    for start in range(0, len(ids), ROWS_AT_ONCE):
        end = start + ROWS_AT_ONCE
        found += _of_rows(logits[start:end], ids[start:end], tops[start:end])
    return found


def _of_rows(logits: Tensor, ids: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(ids, device=logits.device)[:, None])[:, 0].tolist()
    widest = min(max(tops), logits.shape[1])
    if widest == 0:
        return [TokenLogprob(token, value) for token, value in zip(ids, chosen, strict=True)]
    values, tokens = (part.tolist() for part in logprobs.topk(widest))
    return [
        TokenLogprob(token, value, tuple(zip(tokens[i][:top], values[i][:top], strict=True)))
        for i, (token, value, top) in enumerate(zip(ids, chosen, tops, strict=True))
    ]

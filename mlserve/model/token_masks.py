"""Rules out the tokens that grammars don't allow, for all rows of a batch at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from mlserve.model.plan import SamplingRow

__all__ = ["mask_tokens"]

# What a byte of a mask adds to 8 logits, [256, 8]: -inf where its bit isn't set, 0 elsewhere. Looking it up for 16 rows
# of 49k tokens and adding takes 0.4 ms; unpacking the bits 1.7 ms.
_ADDED = torch.where(torch.arange(256)[:, None] >> torch.arange(8) & 1 == 1, 0.0, -math.inf)


def mask_tokens(logits: Tensor, rows: Sequence[SamplingRow]) -> dict[int, str]:
    """Set to -inf, in place, those of `logits: [E, V]` float32 whose token may not follow in the row's grammar.

    Returns why rows failed; all their logits are -inf then. V may differ from what masks cover: tokens beyond a mask
    don't exist, so they may not follow.
    """
    constrained = [(i, row.matcher) for i, row in enumerate(rows) if row.matcher is not None]
    if not constrained:
        return {}
    at, matchers = [i for i, _ in constrained], [matcher for _, matcher in constrained]
    writer = matchers[0].masks
    masks = np.empty((len(matchers), writer.num_words), np.int32)
    writer.write(matchers, masks)
    failures = {i: matcher.error for i, matcher in constrained if matcher.error is not None}
    masks[[row for row, i in enumerate(at) if i in failures]] = 0
    packed = torch.from_numpy(masks.view(np.uint8)).int().to(logits.device)  # [C, 4 * words]
    added = functional.embedding(packed, _ADDED.to(logits.device)).flatten(1)  # [C, 32 * words]
    vocab_size = logits.shape[1]
    if added.shape[1] < vocab_size:
        added = functional.pad(added, (0, vocab_size - added.shape[1]), value=-math.inf)
    if len(at) == len(rows):
        logits += added[:, :vocab_size]
    else:
        logits[at] += added[:, :vocab_size]
    return failures

"""Chooses one token for each row of logits.

The settings of rows may differ at will. A row's token depends on nothing but its logits, its settings, its seed and its
position: not on the rows beside it, nor on whether it was computed before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from mlserve.model.logit_edits import edited_logits, is_edited
from mlserve.model.logprobs import prompt_logprobs, row_logprobs, token_logprobs
from mlserve.model.plan import SamplingRow
from mlserve.model.staging import fetch, place
from mlserve.model.token_masks import mask_tokens
from mlserve.model.uniform import uniforms
from mlserve.request import SamplingParams, TokenLogprob

__all__ = ["Draw", "SampledTokens", "Sampler", "prompt_logprobs"]

BLOCK = 256  # tokens whose weights are summed first, to find the drawn one among few
# Weights in work at once. On a CPU they stay in the cache: 2**21 float32 are 8 MB, 42 rows of 49k tokens.
CELLS_AT_ONCE = {"cpu": 2**21, "cuda": 2**26}
# Weights below 1e-34 of the likeliest token's count as 0, and exp is spared what underflows: on a CPU it takes 3 to 8
# times as long for a row that is mostly masked or very cold.
LEAST_WEIGHT, LEAST_EXPONENT = 1e-34, -80.0
FIRST_SORTED = 1024  # likeliest tokens that are sorted at first to find where top_p cuts; nearly always enough
SORTED_GROWTH = 8


@dataclass(slots=True)
class SampledTokens:
    """What was chosen, one entry for each row of logits."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]  # for the rows that asked for them
    errors: dict[int, str] = field(default_factory=dict)  # rows that failed; their token id says nothing


class Draw(Protocol):
    """Draws a token for each row of logits, on their device: `mlserve.kernels.triton.sampling.draw`."""

    def __call__(
        self,
        logits: Tensor,  # [n, V] float32; may be overwritten
        best: Tensor,  # [n] float32: each row's largest logit
        temperature: Tensor,  # [n] float32, above 0
        top_k: Tensor,  # [n] int32, 1 to V; V doesn't restrict
        top_p: Tensor,  # [n] float64
        min_p: Tensor,  # [n] float32
        uniform: Tensor,  # [n] float64 in [0, 1)
    ) -> Tensor: ...  # [n] int64


class Sampler:
    """Keeps scratch memory from step to step, since fresh pages cost several times the arithmetic on them."""

    def __init__(self, draw: Draw | None = None) -> None:
        """`draw`: kernels that draw tokens. None: Triton's for logits on a GPU, torch operations for those on a CPU."""
        self._draw = draw
        self._scratch = torch.empty(0)

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> SampledTokens:
        """`logits: [R, V]` float32, left as they are; one entry of `rows` for each row."""
        best, ids = _likeliest(logits)
        edited_at = [i for i, row in enumerate(rows) if is_edited(row)]
        edited, failures = logits[:0], {}
        if edited_at:
            edited_rows = [rows[i] for i in edited_at]
            # index_select is 4 times as quick as an index.
            index = _index(edited_at, logits.device)
            edited = edited_logits(logits.index_select(0, index), edited_rows)
            failures = {edited_at[j]: reason for j, reason in mask_tokens(edited, edited_rows).items()}
            best[index], ids[index] = _likeliest(edited)
        drawn_at = [i for i, row in enumerate(rows) if not row.params.is_greedy]
        at_once = max(1, CELLS_AT_ONCE[logits.device.type] // logits.shape[1])
        for start in range(0, len(drawn_at), at_once):
            at = drawn_at[start : start + at_once]
            weights, index = self._gather(logits, at, edited, edited_at), _index(at, logits.device)
            ids[index] = self._drawn(weights, best[index], [rows[i] for i in at])
        return _sampled(logits, rows, ids, best, failures)

    def _drawn(self, logits: Tensor, best: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        draw = self._draw or _kernels_for(logits.device)
        return _draw(logits, best, rows) if draw is None else _draw_by(draw, logits, best, rows)

    def _gather(self, logits: Tensor, at: list[int], edited: Tensor, edited_at: list[int]) -> Tensor:
        """Rows `at`, edited where they are, in scratch memory: `[len(at), V]` padded with -inf to whole blocks."""
        width = logits.shape[1]
        padded = -(-width // BLOCK) * BLOCK
        size = len(at) * padded
        if self._scratch.numel() < size or self._scratch.device != logits.device:
            self._scratch = torch.empty(size, dtype=logits.dtype, device=logits.device)
        rows = self._scratch[:size].view(len(at), padded)
        rows[:, width:] = -math.inf
        rows[:, :width] = logits if len(at) == len(logits) else logits[_index(at, logits.device)]
        if edited_at:
            position = {row: j for j, row in enumerate(edited_at)}
            both = [(k, position[row]) for k, row in enumerate(at) if row in position]
            if both:
                to, from_ = zip(*both, strict=True)
                if len(both) < len(edited):
                    edited = edited.index_select(0, _index(from_, edited.device))
                rows[:, :width].index_copy_(0, _index(to, rows.device), edited)
        return rows


def _likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's largest logit and its token, the first of equals; a NaN is the largest: `[R, V] -> [R], [R]`."""
    if logits.device.type != "cpu":
        best, ids = logits.max(-1)
        return best, ids
    # numpy's is vectorised: 10 times as quick as torch's.
    ids = torch.from_numpy(logits.numpy().argmax(-1))
    return logits.gather(-1, ids[:, None])[:, 0], ids


def _kernels_for(device: torch.device) -> Draw | None:
    if device.type == "cpu":
        return None
    from mlserve.kernels.triton.sampling import draw  # imports triton, which nothing on a CPU does

    return draw


def _draw(logits: Tensor, best: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Draw from softmax(logits / temperature), restricted by top_k, top_p and min_p. Overwrites `logits: [n, V]`.

    best: `[n]` float32, each row's largest logit.
    """
    params = [row.params for row in rows]
    temperature = torch.tensor([p.temperature for p in params], dtype=logits.dtype, device=logits.device)
    # Weights relative to the likeliest token's, which is 1: nothing overflows, however low the temperature.
    weights = logits.sub_(best[:, None]).div_(temperature[:, None]).clamp_(min=LEAST_EXPONENT).exp_()
    functional.threshold(weights, LEAST_WEIGHT, 0.0, inplace=True)
    least = _least_weights(weights, params)
    if least is not None:
        # 1.0 or 0.0 in float32: 5x sooner than a mask of bool.
        weights.mul_(torch.ge(weights, least[:, None], out=torch.empty_like(weights)))
    return _invert_cdf(weights, place(_uniforms(rows), logits.device))


def _draw_by(draw: Draw, logits: Tensor, best: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """`_draw` by a kernel."""
    width = logits.shape[1]
    params = [row.params for row in rows]
    settings = np.array(
        [
            [p.temperature for p in params],
            [min(p.top_k or width, width) for p in params],
            [p.top_p for p in params],
            [p.min_p for p in params],
            _uniforms(rows),
        ]
    )
    # One copy to the device for all of them: float64 holds each exactly.
    temperature, top_k, top_p, min_p, uniform = place(settings, logits.device)
    return draw(logits, best, temperature.float(), top_k.int(), top_p, min_p.float(), uniform)


def _uniforms(rows: Sequence[SamplingRow]) -> NDArray[np.float64]:
    return uniforms([row.seed for row in rows], [len(row.token_ids) - row.num_prompt_tokens for row in rows])


def _least_weights(weights: Tensor, params: Sequence[SamplingParams]) -> Tensor | None:
    """The smallest weight that each row may still draw, `[n]`; None if no row is restricted.

    top_k first, then top_p of what top_k left, and min_p, relative to the likeliest token. Tokens of exactly the least
    weight are all kept, so that the outcome doesn't depend on how equal weights are sorted.
    """
    least = torch.tensor([p.min_p for p in params], dtype=weights.dtype, device=weights.device)
    sorted_at = [i for i, p in enumerate(params) if p.top_k is not None or p.top_p < 1]
    if sorted_at:
        restricted = weights if len(sorted_at) == len(params) else weights[sorted_at]
        cuts = _sorted_cuts(restricted, [params[i] for i in sorted_at])
        least[sorted_at] = torch.maximum(least[sorted_at], cuts)
    elif not any(p.min_p for p in params):
        return None
    return least


def _sorted_cuts(weights: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Where top_k and top_p cut, `[n]`: sorts only as many of the largest weights as it takes."""
    width = weights.shape[1]
    top_k = torch.tensor([min(p.top_k or width, width) for p in params], device=weights.device)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=weights.device)
    total = _block_sums(weights).double().sum(-1)
    cuts = weights.new_zeros(len(params))
    size = min(width, max(FIRST_SORTED if p.top_k is None else p.top_k for p in params))
    pending = torch.arange(len(params), device=weights.device)
    while len(pending):
        largest = _largest(weights[pending], size)
        cdf = largest.cumsum(-1, dtype=torch.float64)
        k = top_k[pending]
        last = k.clamp(max=size) - 1  # of those that top_k leaves and that were sorted
        mass = torch.where(k <= size, cdf.gather(1, last[:, None])[:, 0], total[pending])
        reached = (cdf < (top_p[pending] * mass)[:, None]).sum(-1)  # the first whose cumulative weight is enough
        found = (reached <= last) | (k <= size)
        at = torch.minimum(reached, last)
        cuts[pending[found]] = largest.gather(1, at[:, None])[:, 0][found]
        pending = pending[~found]
        size = min(width, size * SORTED_GROWTH)
    return cuts


def _largest(weights: Tensor, size: int) -> Tensor:
    """Each row's `size` largest, descending: `[n, V] -> [n, size]`."""
    # numpy's are vectorised: 1,024 of 49k in 0.07 ms, all of them in 0.3 ms; torch takes 0.5 ms and 4 ms.
    values, cut = weights.numpy(), weights.shape[1] - size
    if cut:
        values = np.partition(values, cut, axis=-1)[:, cut:]
    return torch.from_numpy(np.sort(values, axis=-1)[:, ::-1].copy())


def _invert_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """The token at which the cumulative weight, in order of token ids, exceeds uniform * total: `[n]` int64.

    `weights: [n, V]` float32, V whole blocks; `uniform: [n]` float64 in [0, 1). First the block, then the token in it.
    """
    cdf = _block_sums(weights).cumsum(-1, dtype=torch.float64)  # [n, V / BLOCK]
    target = uniform[:, None] * cdf[:, -1:]  # [n, 1]
    block = torch.searchsorted(cdf, target, right=True).clamp_(max=cdf.shape[1] - 1)
    before = torch.where(block > 0, cdf.gather(1, (block - 1).clamp(min=0)), 0.0)
    at = torch.arange(len(weights), device=weights.device)[:, None]
    inner = weights.view(len(weights), -1, BLOCK)[at, block][:, 0].cumsum(-1, dtype=torch.float64)  # [n, BLOCK]
    # The block's sum and the last of its cumulative sums may differ in their last digits.
    rest = torch.minimum(target - before, inner[:, -1:] * (1 - 2.0**-53))
    token = torch.searchsorted(inner, rest, right=True).clamp_(max=BLOCK - 1)
    return (block * BLOCK + token)[:, 0]


def _block_sums(weights: Tensor) -> Tensor:
    return weights.view(len(weights), -1, BLOCK).sum(-1)


def _reason(best: float) -> str:
    if math.isnan(best):
        return "the model's logits for the next token hold NaN: check the weights, or use dtype float32"
    if best > 0:
        return "the model's logits for the next token overflow: use dtype float32 or bfloat16"
    return (
        "no token is left to choose: constraint, allowed_token_ids, bad_words, logit_bias and min_tokens rule all of "
        "them out"
    )


def _sampled(
    logits: Tensor, rows: Sequence[SamplingRow], ids: Tensor, best: Tensor, failures: dict[int, str]
) -> SampledTokens:
    """What was chosen, with one wait for the device: it is behind until here."""
    asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    tops = [rows[i].params.logprobs or 0 for i in asked]
    logprobs: tuple[Tensor, ...] = ()
    if asked:
        whole = len(asked) == len(rows)
        index = slice(None) if whole else _index(asked, logits.device)
        inside = ids[index].clamp(max=logits.shape[1] - 1)  # what was drawn from NaN may lie beyond
        logprobs = row_logprobs(logits if whole else logits[index], inside, max(tops))
    host_ids, host_best, *host_logprobs = fetch(ids, best, *logprobs)
    token_ids: list[int] = host_ids.tolist()
    failed = np.flatnonzero(~np.isfinite(host_best)).tolist()
    errors = {i: _reason(float(host_best[i])) for i in failed} | failures
    found: list[TokenLogprob | None] = [None] * len(rows)
    if asked:
        for i, logprob in zip(asked, token_logprobs([token_ids[i] for i in asked], tops, *host_logprobs), strict=True):
            found[i] = None if i in errors else logprob
    return SampledTokens(token_ids, found, errors)


def _index(rows: Sequence[int], device: torch.device) -> Tensor:
    return place(np.array(rows, dtype=np.int64), device)

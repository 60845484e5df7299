"""Rows for the sampler, without an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mlserve.model.plan import TokenMatcher
from mlserve.request import SamplingParams


@dataclass
class Row:
    """What `SamplingRow` asks for."""

    params: SamplingParams
    token_ids: list[int] = field(default_factory=lambda: [1, 2, 3])
    num_prompt_tokens: int = 3
    seed: int = 0
    banned_until_min: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    matcher: TokenMatcher | None = None


def row(
    *,
    prompt: tuple[int, ...] = (1, 2, 3),
    output: tuple[int, ...] = (),
    row_seed: int = 0,
    banned_until_min: tuple[int, ...] = (),
    bad_words_ids: tuple[tuple[int, ...], ...] = (),
    matcher: TokenMatcher | None = None,
    **params: Any,
) -> Row:
    """A row after `output`; the other keywords are `SamplingParams`."""
    tokens = [*prompt, *output]
    return Row(SamplingParams(**params), tokens, len(prompt), row_seed, banned_until_min, bad_words_ids, matcher)

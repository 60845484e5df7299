"""Masks of grammars in the sampler, with matchers that are plain sets of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from rows import row
from torch import Tensor

from mlserve.model.logit_edits import is_edited
from mlserve.model.sampler import Sampler
from mlserve.model.token_masks import mask_tokens

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
VOCABULARY = 50


class SetWriter:
    """Masks of matchers' sets; counts how often it is asked."""

    def __init__(self, num_words: int = 2) -> None:
        self.num_words = num_words
        self.calls: list[int] = []

    def write(self, matchers: Sequence[SetMatcher], masks: np.ndarray) -> None:
        self.calls.append(len(matchers))
        masks[:] = 0
        words = masks.view(np.uint32)
        for i, matcher in enumerate(matchers):
            matcher.error = matcher.fails_with
            for token in matcher.allowed:
                words[i, token // 32] |= np.uint32(1 << token % 32)


class SetMatcher:
    """Allows the same tokens at every step."""

    is_complete = False

    def __init__(self, masks: SetWriter, allowed: set[int], fails_with: str | None = None) -> None:
        self.masks = masks
        self.allowed = allowed
        self.fails_with = fails_with
        self.error: str | None = None

    def advance(self, token_id: int) -> None:
        raise AssertionError("sampling doesn't advance")


def random_logits(rows: int, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0)) * 3


def test_only_constrained_rows_are_edited() -> None:
    assert not is_edited(row())
    assert is_edited(row(matcher=SetMatcher(SetWriter(), {1})))
    logits = random_logits(2)
    assert mask_tokens(logits, [row(), row(bad_words_ids=((1,),))]) == {}
    assert torch.equal(logits, random_logits(2))


@pytest.mark.parametrize("device", DEVICES)
def test_masked_tokens_are_ruled_out_and_others_are_as_they_were(device: str) -> None:
    writer = SetWriter()
    sets = [{0, 31, 32, 49}, {7}, {*range(50)}]
    rows = [row(matcher=SetMatcher(writer, sets[0])), row(), *(row(matcher=SetMatcher(writer, s)) for s in sets[1:])]
    logits = random_logits(4)
    masked = logits.clone().to(device)
    assert mask_tokens(masked, rows) == {}
    assert writer.calls == [3]  # one call for all
    for i, allowed in zip((0, 2, 3), sets, strict=True):
        expected = torch.full((VOCABULARY,), -math.inf)
        expected[[*allowed]] = logits[i, [*allowed]]
        assert torch.equal(masked[i].cpu(), expected)
    assert torch.equal(masked[1].cpu(), logits[1])


@pytest.mark.parametrize(("vocabulary", "words"), [(32, 1), (33, 2), (20, 1), (20, 3), (100, 1), (64, 2)])
def test_masks_of_another_width_than_the_logits(vocabulary: int, words: int) -> None:
    """Tokens without a bit can't follow; bits without a logit say nothing."""
    allowed = {3, 19, words * 32 - 1}
    logits = random_logits(2, vocabulary)
    mask_tokens(logits, [row(matcher=SetMatcher(SetWriter(words), allowed)) for _ in range(2)])
    assert logits[0].isfinite().nonzero()[:, 0].tolist() == sorted(t for t in allowed if t < vocabulary)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampling_draws_from_what_may_follow(temperature: float) -> None:
    writer = SetWriter()
    rows = [row(temperature=temperature, row_seed=i, matcher=SetMatcher(writer, {3, 40})) for i in range(64)]
    logits = random_logits(1).expand(64, -1).contiguous()
    logits[:, 3] = logits[:, 40] = 1.0
    logits[:, 5] = 9.0
    before = logits.clone()
    sampled = Sampler().sample(logits, rows)
    assert torch.equal(logits, before)
    assert set(sampled.token_ids) == ({3} if temperature == 0 else {3, 40})
    assert sampled.errors == {}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_draws_the_same_with_and_without_constrained_mates(temperature: float) -> None:
    logits = random_logits(6)
    writer = SetWriter()
    rows = [
        row(
            temperature=temperature,
            row_seed=i,
            repetition_penalty=1.5 if i == 3 else 1.0,
            matcher=SetMatcher(writer, {*range(i, 50, 3)}) if i % 2 else None,
        )
        for i in range(6)
    ]
    together = Sampler().sample(logits, rows)
    for i in range(6):
        assert Sampler().sample(logits[i : i + 1], rows[i : i + 1]).token_ids == [together.token_ids[i]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_matcher_that_fails_fails_its_row_only(temperature: float) -> None:
    writer = SetWriter()
    rows = [
        row(temperature=temperature, matcher=SetMatcher(writer, {5})),
        row(temperature=temperature, matcher=SetMatcher(writer, {6}, fails_with="too complex"), logprobs=1),
        row(temperature=temperature),
        row(temperature=temperature, matcher=SetMatcher(writer, {7})),
    ]
    sampled = Sampler().sample(random_logits(4), rows)
    assert sampled.errors == {1: "too complex"}
    assert sampled.token_ids[0] == 5
    assert sampled.token_ids[3] == 7
    assert sampled.logprobs[1] is None


def test_an_empty_mask_fails_its_row_only() -> None:
    writer = SetWriter()
    rows = [row(matcher=SetMatcher(writer, set())), row(matcher=SetMatcher(writer, {8}))]
    sampled = Sampler().sample(random_logits(2), rows)
    assert sampled.errors.keys() == {0}
    assert "no token is left to choose: constraint" in sampled.errors[0]
    assert sampled.token_ids[1] == 8


def test_logits_that_are_not_numbers_fail_their_row_though_they_are_masked() -> None:
    logits = random_logits(1)
    logits[0, 9] = math.nan
    assert "NaN" in Sampler().sample(logits, [row(matcher=SetMatcher(SetWriter(), {3}))]).errors[0]


def test_logprobs_are_those_before_the_mask() -> None:
    logits = random_logits(1)
    free = Sampler().sample(logits, [row(logprobs=3)])
    masked = Sampler().sample(logits, [row(logprobs=3, matcher=SetMatcher(SetWriter(), {11}))])
    assert masked.token_ids == [11]
    assert free.logprobs[0] is not None
    assert masked.logprobs[0] is not None
    assert masked.logprobs[0].top == free.logprobs[0].top
    assert masked.logprobs[0].logprob == pytest.approx(logits[0].log_softmax(-1)[11].item(), abs=1e-5)

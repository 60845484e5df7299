"""Penalties, biases and masks."""

from __future__ import annotations

import math

import pytest
import torch
from rows import Row, row
from torch import Tensor
from transformers import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor

from mlserve.model.logit_edits import edited_logits, is_edited
from mlserve.model.sampler import Sampler

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
VOCABULARY = 20


def random_logits(rows: int = 1) -> Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 3


def edited(logits: Tensor, wanted: Row) -> Tensor:
    assert is_edited(wanted)
    return edited_logits(logits.clone(), [wanted])


def banned(wanted: Row) -> list[int]:
    """Tokens that the edits mask; all others must be untouched."""
    logits = random_logits()
    after = edited(logits, wanted)[0]
    masked = after == -math.inf
    assert torch.equal(after[~masked], logits[0][~masked])
    return masked.nonzero()[:, 0].tolist()


def test_a_row_without_options_is_not_edited() -> None:
    assert not is_edited(row(temperature=1.0, top_p=0.5, top_k=3, min_p=0.1, logprobs=3, output=(4, 5)))


def test_repetition_penalty_counts_prompt_and_output_as_transformers_does() -> None:
    logits = random_logits()
    assert logits[0, [3, 7, 11]].min() < 0 < logits[0, [3, 7, 11]].max()
    wanted = row(prompt=(3, 7, 3), output=(11, 11), repetition_penalty=1.7)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([wanted.token_ids]), logits.clone())
    torch.testing.assert_close(edited(logits, wanted), expected)


def test_presence_and_frequency_penalties_count_output_only() -> None:
    logits = random_logits()
    expected = logits.clone()
    expected[0, 5] -= 0.5 + 3 * 0.25
    expected[0, 2] -= 0.5 + 1 * 0.25
    wanted = row(prompt=(1, 2, 1), output=(5, 2, 5, 5), presence_penalty=0.5, frequency_penalty=0.25)
    torch.testing.assert_close(edited(logits, wanted), expected)


def test_negative_penalties_encourage() -> None:
    after = edited(random_logits(), row(output=(5, 5), frequency_penalty=-1.0))
    torch.testing.assert_close(after[0, 5], random_logits()[0, 5] + 2)


def test_penalties_before_any_output() -> None:
    wanted = row(presence_penalty=1.0, frequency_penalty=1.0)
    assert torch.equal(edited(random_logits(), wanted), random_logits())


def test_logit_bias() -> None:
    expected = random_logits()
    expected[0, 4] += 2.5
    expected[0, 9] -= 100
    torch.testing.assert_close(edited(random_logits(), row(logit_bias={4: 2.5, 9: -100.0})), expected)


def test_bias_comes_after_penalties() -> None:
    """A penalty scales what the model said, not what the caller added."""
    logits = torch.full((1, VOCABULARY), 4.0)
    after = edited(logits, row(prompt=(6,), repetition_penalty=2.0, logit_bias={6: 1.0}))
    assert after[0, 6] == 4.0 / 2 + 1


def test_allowed_token_ids() -> None:
    assert banned(row(allowed_token_ids=(3, 8))) == [i for i in range(VOCABULARY) if i not in (3, 8)]


def test_bans_hold_against_bias() -> None:
    after = edited(random_logits(), row(bad_words_ids=((4,),), logit_bias={4: 100.0}))
    assert after[0, 4] == -math.inf


@pytest.mark.parametrize(("output", "masked"), [((), [9, 15]), ((4,), [9, 15]), ((4, 4), []), ((4, 4, 4), [])])
def test_min_tokens_bans_the_end(output: tuple[int, ...], masked: list[int]) -> None:
    wanted = row(output=output, min_tokens=2, banned_until_min=(9, 15))
    assert is_edited(wanted) == bool(masked)
    if masked:
        assert banned(wanted) == masked


BAD_WORDS = ((7,), (2, 5), (1, 2, 6), (3, 3, 3, 8))


@pytest.mark.parametrize(
    ("prompt", "output", "masked"),
    [
        ((1,), (), [7]),
        ((1,), (2,), [5, 6, 7]),  # the sequence may begin in the prompt
        ((4,), (1, 2), [5, 6, 7]),
        ((2,), (1,), [7]),
        ((3, 3), (), [7]),
        ((3, 3), (3,), [7, 8]),
        ((3,), (), [7]),  # shorter than the bad word's beginning
    ],
)
def test_bad_words_ban_what_would_complete_them(
    prompt: tuple[int, ...], output: tuple[int, ...], masked: list[int]
) -> None:
    wanted = row(prompt=prompt, output=output, bad_words_ids=BAD_WORDS)
    assert banned(wanted) == masked
    processor = NoBadWordsLogitsProcessor([list(ids) for ids in BAD_WORDS])
    expected = processor(torch.tensor([wanted.token_ids]), random_logits())
    assert torch.equal(edited(random_logits(), wanted), expected)


def test_tokens_that_the_model_lacks_are_ignored() -> None:
    """A tokenizer may hold added tokens that the embedding has no row for."""
    assert banned(row(min_tokens=1, banned_until_min=(9, VOCABULARY + 3))) == [9]


@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_edited_as_if_alone(device: str) -> None:
    rows = [
        row(repetition_penalty=1.5, output=(4, 5)),
        row(presence_penalty=1.0, output=(6,)),
        row(frequency_penalty=0.5, output=(6, 6, 1), logit_bias={0: 1.0}),
        row(allowed_token_ids=(1, 2, 3), bad_words_ids=((3,),)),
        row(min_tokens=3, banned_until_min=(10,), repetition_penalty=0.8),
    ]
    logits = random_logits(len(rows))
    together = edited_logits(logits.clone().to(device), rows).cpu()
    for i, wanted in enumerate(rows):
        torch.testing.assert_close(together[i : i + 1], edited(logits[i : i + 1], wanted))


def test_edits_decide_the_token_and_spare_the_mates() -> None:
    logits = torch.zeros(4, VOCABULARY)
    logits[:, 5], logits[:, 6] = 2.0, 1.0
    rows = [row(), row(bad_words_ids=((5,),)), row(temperature=1.0, allowed_token_ids=(6,)), row(logit_bias={8: 50.0})]
    assert Sampler().sample(logits, rows).token_ids == [5, 6, 6, 8]

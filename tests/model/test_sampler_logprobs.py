"""Log-probabilities: the model's own, whatever the request does to its logits."""

from __future__ import annotations

import pytest
import torch
from rows import row
from torch import Tensor

from mlserve.model.sampler import Sampler, prompt_logprobs
from mlserve.request import TokenLogprob


def random_logits(rows: int, vocabulary: int = 320) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0)) * 3


def check(found: TokenLogprob | None, logits: Tensor, token: int, top: int) -> None:
    expected = logits.double().log_softmax(-1)
    assert found is not None
    assert found.token_id == token
    assert found.logprob == pytest.approx(expected[token].item(), abs=1e-5)
    values, ids = expected.topk(top)
    assert [i for i, _ in found.top] == ids.tolist()
    assert [value for _, value in found.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_rows_get_as_many_as_they_asked_for() -> None:
    logits = random_logits(5)
    rows = [row(logprobs=n) if n is not None else row() for n in (3, None, 0, 20, 1)]
    sampled = Sampler().sample(logits, rows)
    assert sampled.logprobs[1] is None
    for i, top in ((0, 3), (2, 0), (3, 20), (4, 1)):
        check(sampled.logprobs[i], logits[i], sampled.token_ids[i], top)


def test_temperature_penalties_and_masks_dont_show() -> None:
    logits = random_logits(2)
    rows = [
        row(logprobs=2, temperature=0.5, top_k=2, row_seed=1),
        row(logprobs=2, logit_bias={7: 100.0}, repetition_penalty=3.0),
    ]
    sampled = Sampler().sample(logits, rows)
    assert sampled.token_ids[1] == 7
    for i in range(2):
        check(sampled.logprobs[i], logits[i], sampled.token_ids[i], 2)


def test_more_than_the_vocabulary() -> None:
    logits = random_logits(1, vocabulary=5)
    sampled = Sampler().sample(logits, [row(logprobs=64)])
    check(sampled.logprobs[0], logits[0], sampled.token_ids[0], 5)


def test_large_logits_lose_no_digits() -> None:
    logits = torch.tensor([[1000.0, 999.0, -1000.0]])
    found = prompt_logprobs(logits, [1], 1)[0]
    assert found.logprob == pytest.approx(-1.3132617, abs=1e-4)


@pytest.mark.parametrize("count", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("top", [0, 2])
def test_prompt_logprobs(count: int, top: int) -> None:
    logits = random_logits(count)
    next_ids = [(7 * i) % 320 for i in range(count)]
    found = prompt_logprobs(logits, next_ids, top)
    assert len(found) == count
    for i in range(count):
        check(found[i], logits[i], next_ids[i], top)


def test_no_prompt_logprobs() -> None:
    assert prompt_logprobs(torch.empty(0, 320), [], 3) == []

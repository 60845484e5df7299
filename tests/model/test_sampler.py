"""Which token is chosen: greedy, drawn, restricted, and failing rows."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from rows import Row, row
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mlserve.model.sampler import Sampler
from mlserve.model.uniform import uniforms

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def random_logits(rows: int, vocabulary: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def sample(logits: Tensor, rows: list[Row]) -> list[int]:
    sampled = Sampler().sample(logits, rows)
    assert sampled.errors == {}
    return sampled.token_ids


def expected_token(logits: Tensor, wanted: Row) -> int:
    """By transformers' warpers in float64, then the inverse of the cumulative distribution in order of token ids."""
    p = wanted.params
    warpers = LogitsProcessorList([TemperatureLogitsWarper(p.temperature)])
    if p.top_k is not None:
        warpers.append(TopKLogitsWarper(p.top_k))
    if p.top_p < 1:
        warpers.append(TopPLogitsWarper(p.top_p))
    if p.min_p > 0:
        warpers.append(MinPLogitsWarper(p.min_p))
    probabilities = warpers(torch.tensor([wanted.token_ids]), logits[None].double())[0].softmax(-1)
    u = uniforms([wanted.seed], [len(wanted.token_ids) - wanted.num_prompt_tokens])[0]
    cdf = probabilities.cumsum(0).numpy()
    assert np.abs(cdf - u).min() > 1e-7, "the drawn number is too near a boundary to tell: choose another seed"
    return int(np.searchsorted(cdf, u, side="right"))


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [-5.0, -7.0, -6.0, -5.5]])
    assert sample(logits, [row(), row()]) == [1, 0]


SETTINGS = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 3.0},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_k_1": {"temperature": 1.0, "top_k": 1},
    "top_k_beyond_vocabulary": {"temperature": 1.0, "top_k": 10**6},
    "top_p": {"temperature": 1.0, "top_p": 0.6},
    "top_p_tiny": {"temperature": 1.0, "top_p": 1e-4},
    "top_p_almost_1": {"temperature": 2.0, "top_p": 0.9999},
    "min_p": {"temperature": 1.3, "min_p": 0.1},
    "top_k_then_top_p": {"temperature": 1.0, "top_k": 8, "top_p": 0.7},
    "all": {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("vocabulary", [50, 256, 20000], ids="V{}".format)
def test_draws_as_transformers_would(settings: dict[str, float], vocabulary: int, device: str) -> None:
    logits = random_logits(20, vocabulary)
    rows = [row(row_seed=i, output=tuple(range(i % 3)), **settings) for i in range(20)]
    assert sample(logits.to(device), rows) == [expected_token(logits[i], rows[i]) for i in range(20)]


def test_flat_distributions_need_the_whole_sort() -> None:
    """With 20,000 nearly equal tokens top_p cuts far beyond the first that are sorted."""
    logits = random_logits(8, 20000, spread=0.01)
    rows = [row(row_seed=i, temperature=1.0, top_p=p) for i, p in enumerate([0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.2, 0.04])]
    assert sample(logits, rows) == [expected_token(logits[i], rows[i]) for i in range(8)]


def test_frequencies_follow_the_probabilities() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(4000, 4)
    drawn = sample(logits, [row(row_seed=i, temperature=1.0) for i in range(4000)])
    frequencies = np.bincount(drawn, minlength=4) / 4000
    assert np.abs(frequencies - logits[0].softmax(-1).numpy()).max() < 0.02


def test_equal_logits_at_the_cut_are_all_kept() -> None:
    """Which of them a sort puts first must not matter."""
    logits = torch.tensor([[5.0, 4.0, 4.0, 4.0, 1.0]]).expand(400, 5)
    assert set(sample(logits, [row(row_seed=i, temperature=1.0, top_k=2) for i in range(400)])) == {0, 1, 2, 3}


MATES = {
    "seeded": {"temperature": 0.8, "row_seed": 7},
    "greedy": {},
    "penalised": {"frequency_penalty": 1.0, "output": (4, 4, 5)},
    "top_p": {"temperature": 1.2, "top_p": 0.5, "row_seed": 9},
    "top_k_large": {"temperature": 1.0, "top_k": 300, "row_seed": 1},
    "allowed": {"temperature": 1.0, "allowed_token_ids": (1, 2)},
    "logprobs": {"logprobs": 4},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_case_4_04_batch_mates_and_their_order_change_nothing(settings: dict[str, float]) -> None:
    vocabulary = 5000
    mine = random_logits(1, vocabulary)
    rng = random.Random(0)
    wanted = row(row_seed=42, **settings)
    alone = sample(mine, [wanted])[0]
    for _ in range(8):
        mates = [row(**mate) for mate in rng.sample(list(MATES.values()), k=rng.randrange(1, len(MATES)))]
        at = rng.randrange(len(mates) + 1)
        others = random_logits(len(mates), vocabulary, seed=rng.randrange(1000))
        logits = torch.cat([others[:at], mine, others[at:]])
        assert sample(logits, [*mates[:at], wanted, *mates[at:]])[at] == alone


def test_large_batches_are_drawn_in_parts() -> None:
    vocabulary = 2**15
    logits = random_logits(100, vocabulary)
    rows = [row(row_seed=i, temperature=1.0) for i in range(100)]
    assert sample(logits, rows) == [sample(logits[i : i + 1], [rows[i]])[0] for i in range(100)]


def test_case_4_05_seeds_of_siblings_give_different_tokens() -> None:
    logits = random_logits(1, 1000, spread=1.0).expand(3, 1000)
    drawn = {
        tuple(sample(logits, [row(row_seed=seed, output=(0,) * at, temperature=1.0) for seed in (7, 8, 9)]))
        for at in range(4)
    }
    assert all(len(set(tokens)) > 1 for tokens in drawn)
    assert len(drawn) == 4  # and each position draws anew


def test_preemption_draws_the_same_again() -> None:
    """A token depends on the position in the output, not on how often the row was sampled."""
    logits = random_logits(1, 1000)
    sampler, wanted = Sampler(), row(row_seed=3, temperature=1.0, output=(9, 9))
    first = sampler.sample(logits, [wanted]).token_ids
    sampler.sample(random_logits(5, 1000, seed=1), [row(temperature=1.0)] * 5)
    assert sampler.sample(logits, [wanted]).token_ids == first


@pytest.mark.parametrize("temperature", [1e-12, 1e-4, 9e-4])
@pytest.mark.parametrize("spread", [1e-3, 3.0, 1e4], ids="spread{}".format)
def test_case_4_10_tiny_temperatures_are_greedy(temperature: float, spread: float) -> None:
    logits = random_logits(30, 320, spread=spread)
    logits[:, 0] = logits[:, 1:].max(-1).values  # two equal best
    greedy = sample(logits, [row() for _ in range(30)])
    rows = [row(row_seed=i, temperature=temperature if i % 2 else 0.0) for i in range(30)]
    assert sample(logits, rows) == greedy


def test_low_temperatures_overflow_nowhere() -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0], [100.0, 99.0, -1e30]])
    assert sample(logits, [row(temperature=1e-3), row(temperature=1e-3)]) == [0, 0]


def test_top_p_tiny_is_greedy() -> None:
    logits = random_logits(20, 320)
    greedy = sample(logits, [row()] * 20)
    assert sample(logits, [row(row_seed=i, temperature=1.0, top_p=1e-4) for i in range(20)]) == greedy


BROKEN = {
    "nan": (math.nan, "hold NaN"),
    "overflow": (math.inf, "overflow"),
}


@pytest.mark.parametrize(("value", "message"), BROKEN.values(), ids=BROKEN.keys())
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "top_p": 0.9, "top_k": 4}], ids=["greedy", "drawn"])
def test_a_broken_row_fails_alone(value: float, message: str, settings: dict[str, float]) -> None:
    logits = random_logits(3, 320)
    healthy = [row(row_seed=i, logprobs=1, **settings) for i in range(3)]
    alone = sample(logits, healthy)
    logits[1, 17] = value
    sampled = Sampler().sample(logits, healthy)
    assert list(sampled.errors) == [1]
    assert message in sampled.errors[1]
    assert sampled.token_ids[::2] == alone[::2]
    assert sampled.logprobs[1] is None
    assert None not in sampled.logprobs[::2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_tokens_are_all_banned_fails_alone(temperature: float) -> None:
    logits = random_logits(2, 320)
    contradictory = row(temperature=temperature, allowed_token_ids=(5,), bad_words_ids=((5,),))
    sampled = Sampler().sample(logits, [contradictory, row()])
    assert list(sampled.errors) == [0]
    assert "no token is left" in sampled.errors[0]
    assert sampled.token_ids[1] == int(logits[1].argmax())


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 1.0, "top_p": 0.5}, {"repetition_penalty": 2.0, "logit_bias": {3: 5.0}, "logprobs": 2}],
    ids=["greedy", "drawn", "edited"],
)
def test_logits_are_left_as_they_are(settings: dict[str, float]) -> None:
    logits = random_logits(4, 320)
    before = logits.clone()
    sample(logits, [row(**settings)] * 4)
    assert torch.equal(logits, before)


def test_no_rows() -> None:
    sampled = Sampler().sample(torch.empty(0, 320), [])
    assert (sampled.token_ids, sampled.logprobs, sampled.errors) == ([], [], {})


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    grid = uniforms([seed for seed in range(200) for _ in range(200)], list(range(200)) * 200).reshape(200, 200)
    assert 0.0 <= grid.min() < grid.max() < 1.0
    assert np.abs(np.bincount((grid * 10).astype(int).ravel(), minlength=10) / 40000 - 0.1).max() < 0.01
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.02  # neighbouring seeds
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.02  # neighbouring positions


def test_uniforms_stay_what_they_were() -> None:
    """A seed promises the same text with every later release."""
    drawn = uniforms([0, 42, 2**64 - 1, 42], [0, 0, 5, 1])
    assert drawn.tolist() == [0.6524484863740322, 0.34329192209867343, 0.15403342580516755, 0.9557467261317436]


def test_seeds_of_64_bits_are_all_different() -> None:
    assert len(set(uniforms([0, 1, 2**32, 2**63, 2**64 - 1], [0] * 5))) == 5

"""Drawing by Triton kernels against the sampler on a CPU."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from rows import Row, row
from torch import Tensor

from mlserve.kernels.triton.sampling import BLOCK, draw
from mlserve.model import sampler
from mlserve.model.sampler import Sampler
from mlserve.model.uniform import uniforms

# An infinity minus itself: the weight is NaN, which the kernel means to be 0; numpy warns.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

LAST = 1 - 2.0**-53  # the largest number that is drawn
SETTINGS = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 3.0},
    "cold": {"temperature": 0.01},
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


def random_logits(rows: int, vocabulary: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def tokens(logits: Tensor, rows: list[Row], device: torch.device) -> list[int]:
    """By the kernels."""
    sampled = Sampler(draw).sample(logits.to(device), rows)
    assert sampled.errors == {}
    return sampled.token_ids


def test_blocks_are_the_samplers() -> None:
    assert BLOCK == sampler.BLOCK


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(50, torch.bfloat16), (4097, torch.float32), (5000, torch.bfloat16)], ids=str
)
def test_draws_as_the_sampler_does_on_a_cpu(dtype: torch.dtype, vocabulary: int, device: torch.device) -> None:
    """All settings in one batch. Logits of bfloat16 are often equal, at the cuts too."""
    rows = [row(row_seed=i, **settings) for settings, i in itertools.product(SETTINGS.values(), range(2))]
    logits = random_logits(len(rows), vocabulary).to(dtype).float()
    assert tokens(logits, rows, device) == Sampler().sample(logits, rows).token_ids


def restricted(weights: NDArray[np.float64], wanted: Row) -> tuple[NDArray[np.float64], float]:
    """The weights that may be drawn, the others 0, and the least of them."""
    p = wanted.params
    descending = np.sort(weights)[::-1][: p.top_k]
    cdf = descending.cumsum()
    cut = max(descending[min(np.searchsorted(cdf, p.top_p * cdf[-1]), len(cdf) - 1)], p.min_p)
    return np.where(weights >= cut, weights, 0.0), cut


@pytest.mark.parametrize("vocabulary", [700, *(pytest.param(v, marks=pytest.mark.gpu) for v in (128256, 262144))])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_the_drawn_number_lies_at_the_token(spread: float, vocabulary: int, device: torch.device) -> None:
    """By float64. Whether a token at the cut stays may differ, which moves all others by its weight."""
    rows = [row(row_seed=i, **settings) for i, settings in enumerate(SETTINGS.values())]
    logits = random_logits(len(rows), vocabulary, spread=spread)
    for scores, wanted, token in zip(logits.double().numpy(), rows, tokens(logits, rows, device), strict=True):
        weights = np.exp((scores - scores.max()) / wanted.params.temperature)
        left, cut = restricted(weights, wanted)
        cdf = left.cumsum()
        drawn = uniforms([wanted.seed], [0])[0] * cdf[-1]
        near = cut + 1e-6 * cdf[-1]
        assert weights[token] >= cut * (1 - 1e-5)
        assert cdf[token] - left[token] - near <= drawn <= cdf[token] + near


@pytest.mark.gpu
def test_a_captured_graph_draws_with_any_settings(device: torch.device) -> None:
    logits = torch.empty(len(SETTINGS), 128256, device=device)
    best, temperature, min_p = (torch.ones(len(SETTINGS), device=device) for _ in range(3))
    top_k, top_p, uniform = temperature.int(), temperature.double(), temperature.double() * 0.5
    arguments = (logits, best, temperature, top_k, top_p, min_p, uniform)
    draw(*arguments)  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = draw(*arguments)
    for seed in range(3):
        new = random_logits(len(SETTINGS), 128256, seed).to(device)
        best.copy_(new.max(-1).values)
        for i, settings in enumerate(list(SETTINGS.values())[seed:] + list(SETTINGS.values())[:seed]):
            temperature[i], top_k[i] = settings["temperature"], min(int(settings.get("top_k", 128256)), 128256)
            top_p[i], min_p[i], uniform[i] = settings.get("top_p", 1.0), settings.get("min_p", 0.0), 0.1 + 0.07 * i
        logits.copy_(new)
        expected = draw(*arguments).tolist()
        logits.copy_(new)
        graph.replay()
        assert drawn.tolist() == expected


def test_flat_distributions(device: torch.device) -> None:
    logits = random_logits(4, 5000, spread=0.01)
    rows = [row(row_seed=i, temperature=1.0, top_p=p) for i, p in enumerate([0.1, 0.5, 0.99, 0.04])]
    assert tokens(logits, rows, device) == Sampler().sample(logits, rows).token_ids


def drawn_at(
    uniform: float, logits: Tensor, device: torch.device, *, top_k: int | None = None, top_p: float = 1
) -> int:
    """At 0 the first token that may be drawn, in order of ids; at `LAST` the last."""
    one = torch.ones(1, device=device)
    settings = (one.int() * (top_k or len(logits)), one.double() * top_p, one * 0)
    return int(
        draw(logits[None].to(device, copy=True), logits.max()[None].to(device), one, *settings, one.double() * uniform)
    )


def test_equal_logits_at_the_cut_are_all_kept(device: torch.device) -> None:
    logits = torch.tensor([1.0, 4.0, 4.0, 5.0, 4.0, 1.0])
    assert [drawn_at(uniform, logits, device, top_k=2) for uniform in (0.0, LAST)] == [1, 4]


@pytest.mark.parametrize(("top_k", "top_p", "last"), [(3, 1.0, 2), (4, 0.9, 2), (8, 0.5, 0), (8, 0.6, 1), (2, 0.99, 1)])
def test_top_p_is_of_what_top_k_left(top_k: int, top_p: float, last: int, device: torch.device) -> None:
    """Of 1/2, 1/4, 1/8 and so on: top_k 4 and top_p 0.9 leave three, which have 0.93 of the weight of four."""
    logits = -math.log(2) * torch.arange(8.0)
    assert drawn_at(LAST, logits, device, top_k=top_k, top_p=top_p) == last


def test_a_token_without_weight_is_never_drawn(device: torch.device) -> None:
    """At both ends of the distribution, in whole blocks and within one."""
    logits = torch.full((2000,), -math.inf)
    logits[[700, 1300]] = 1.0
    assert [drawn_at(uniform, logits, device) for uniform in (0.0, LAST)] == [700, 1300]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_broken_row_fails_alone(value: float, device: torch.device) -> None:
    logits = random_logits(3, 320)
    settings = {"temperature": 1.0, "top_p": 0.9, "top_k": 4}
    rows = [row(row_seed=i, **settings) for i in range(3)]
    alone = tokens(logits, rows, device)
    logits[1] = value
    sampled = Sampler(draw).sample(logits.to(device), rows)
    assert list(sampled.errors) == [1]
    assert sampled.token_ids[::2] == alone[::2]
    assert 0 <= sampled.token_ids[1] < 320


def test_low_temperatures_overflow_nowhere(device: torch.device) -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0], [100.0, 99.0, -1e30]])
    with np.errstate(over="ignore"):  # to -inf, whose weight is 0
        assert tokens(logits, [row(temperature=1e-3), row(temperature=1e-3)], device) == [0, 0]


def test_no_rows(device: torch.device) -> None:
    nothing = torch.empty(0, device=device)
    settings = (nothing, nothing, nothing.int(), nothing.double(), nothing, nothing.double())
    assert draw(torch.empty(0, 320, device=device), *settings).shape == (0,)


@pytest.mark.parametrize("logits", [torch.ones(2, 6).bfloat16(), torch.ones(6, 2).T], ids=["bfloat16", "strided"])
def test_logits_that_are_refused(logits: Tensor) -> None:
    one = torch.ones(2)
    with pytest.raises(ValueError, match="logits must be dense float32"):
        draw(logits, one, one, one.int(), one.double(), one, one.double())

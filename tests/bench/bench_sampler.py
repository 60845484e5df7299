"""Milliseconds to choose the tokens of one step, by kind of request and by rows; and to load a tokenizer.

python -m tests.bench.bench_sampler
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mlserve.config import EMBEDDED_MODEL
from mlserve.engine.tokenizer import load_tokenizer
from mlserve.model.sampler import Sampler
from mlserve.model.sources import find_model
from mlserve.request import SamplingParams

VOCABULARY = 49152
KINDS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=0.8),
    "top_k 50": SamplingParams(temperature=0.8, top_k=50),
    "top_p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "min_p 0.05": SamplingParams(temperature=0.8, min_p=0.05),
    "penalties, 300 tokens": SamplingParams(repetition_penalty=1.1, frequency_penalty=0.5),
    "logit_bias": SamplingParams(logit_bias={5: 3.0}),
    "logprobs 5": SamplingParams(logprobs=5),
}


@dataclass
class Row:
    """Row `seed` of a batch, 200 tokens of prompt and 100 of output."""

    params: SamplingParams
    seed: int
    num_prompt_tokens: int = 200
    banned_until_min: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    matcher: None = None

    @property
    def token_ids(self) -> list[int]:
        """The same for all."""
        return TOKENS


TOKENS = list(range(300))


def zipf_logits(rows: int, vocabulary: int) -> Tensor:
    """Probabilities that fall with rank^-1.5, as a language model's do; each row in an order of its own."""
    falling = -1.5 * torch.arange(1, vocabulary + 1).log()
    return torch.stack([falling[torch.randperm(vocabulary)] for _ in range(rows)])


def best_ms(work: Callable[[], object], times: int = 7) -> float:
    """The best of several: other processes only ever make it worse."""
    work()
    found = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found) * 1e3


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(2)
    sampler = Sampler()
    batches = {rows: zipf_logits(rows, VOCABULARY) for rows in (1, 16, 256)}
    print(f"{'ms per step':24}" + "".join(f"{rows:>9} rows" for rows in batches))
    for name, params in KINDS.items():
        cells = [
            best_ms(lambda rows=rows, x=x, p=params: sampler.sample(x, [Row(p, i) for i in range(rows)]))  # type: ignore[misc]
            for rows, x in batches.items()
        ]
        print(f"{name:24}" + "".join(f"{cell:14.2f}" for cell in cells))
    tiny = torch.randn(256, 256)  # next to no arithmetic
    for name in ("greedy", "temperature"):
        rows = [Row(KINDS[name], i) for i in range(256)]
        print(f"Python of 256 {name} rows: {best_ms(lambda rows=rows: sampler.sample(tiny, rows), 50):.2f} ms")  # type: ignore[misc]
    path = find_model(EMBEDDED_MODEL)
    print(f"tokenizer of {EMBEDDED_MODEL}: {best_ms(lambda: load_tokenizer(path), 3):.0f} ms")


if __name__ == "__main__":
    main()

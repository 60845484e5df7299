"""A model that says something else about every context, and the real sampler behind it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash
from torch import Tensor

from mlserve.model.plan import SequenceT, StepPlan, StepResult
from mlserve.model.sampler import Sampler


class RandomLogitsRunner:
    """Logits are normal(0, 3), drawn from a hash of all tokens so far, plus what a token is favoured with."""

    def __init__(self, vocab_size: int, favours: Mapping[int, float] | None = None) -> None:
        self.vocab_size = vocab_size
        self.favours = favours or {}
        self.num_steps = 0
        self._sampler = Sampler()

    def run(self, plan: StepPlan[SequenceT]) -> StepResult:
        self.num_steps += 1
        result = StepResult()
        if plan.sampled:
            rows = [plan.sequences[row] for row in plan.sampled]
            logits = torch.stack([self._logits(sequence.token_ids) for sequence in rows])
            before = logits.clone()
            chosen = self._sampler.sample(logits, rows)
            assert torch.equal(logits, before), "the sampler leaves logits as they are"
            for i, row in enumerate(plan.sampled):
                if i in chosen.errors:
                    result.errors[row] = chosen.errors[i]
                else:
                    result.token_ids[row] = chosen.token_ids[i]
        return result

    def _logits(self, tokens: list[int]) -> Tensor:
        generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(repr(tokens).encode()) >> 1)
        logits = 3 * torch.randn(self.vocab_size, generator=generator)
        for token, favour in self.favours.items():
            logits[token] += favour
        return logits

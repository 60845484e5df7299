"""Drives a model runner over sequences of its own, one step at a time, without scheduler or cache."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mlserve.adapters.host import HostAdapter, HostWeights
from mlserve.adapters.spec import BaseShape, Module, Site
from mlserve.model.inputs import StepInputs, step_inputs
from mlserve.model.plan import SlotLoad, StepPlan, StepResult
from mlserve.model.runner import ModelRunner
from mlserve.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0, logprobs=5)


@dataclass(eq=False)
class Planned:
    """A sequence as a plan has it."""

    token_ids: list[int]
    params: SamplingParams = GREEDY
    adapter_slot: int | None = None
    adapter_start: int = 0
    wants_prompt_logprobs: bool = False
    rope_positions: Any = None
    num_computed: int = 0
    seed: int = 7
    block_table: array[int] = field(default_factory=lambda: array("i"))
    num_prompt_tokens: int = 0
    images: tuple[Any, ...] = ()
    whole_ranges: tuple[tuple[int, int], ...] = ()
    banned_until_min: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    matcher: None = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)


class Driver:
    """Blocks are handed out at random from a pool of NaN, so that whoever reads what was not written shows."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        runner.kv[1:] = torch.nan
        self.free = list(range(1, len(runner.kv)))
        random.Random(0).shuffle(self.free)

    def step(self, chunks: Sequence[tuple[Planned, int]], loads: Sequence[SlotLoad] = ()) -> StepResult:
        """Compute the next `count` tokens of each; a sequence that is then computed whole gets a token more."""
        plan: StepPlan[Planned] = StepPlan(loads=list(loads))
        for row, (sequence, count) in enumerate(chunks):
            end = sequence.num_computed + count
            while len(sequence.block_table) * self.runner.block_size < end:
                sequence.block_table.append(self.free.pop())
            plan.sequences.append(sequence)
            plan.query_lens.append(count)
            if end == len(sequence.token_ids):
                plan.sampled.append(row)
        result = self.runner.run(plan)
        assert not result.errors
        for row, (sequence, count) in enumerate(chunks):
            sequence.num_computed += count
            if row in result.token_ids:
                sequence.token_ids.append(result.token_ids[row])
        return result

    def decode(self, sequences: Sequence[Planned]) -> StepResult:
        """One token of each."""
        return self.step([(sequence, 1) for sequence in sequences])

    def inputs(self, sequences: Sequence[Planned]) -> StepInputs:
        """What the next step of decoding them would be given; their blocks have room for it."""
        plan = StepPlan(list(sequences), [1] * len(sequences))
        return step_inputs(plan, range(len(sequences)), self.runner.block_size)

    def end(self, sequence: Planned) -> None:
        """Give its blocks back."""
        self.free += sequence.block_table


def random_adapter(
    base: BaseShape, seed: int, *, rank: int = 4, modules: Sequence[Module], dora: bool = False
) -> HostAdapter:
    """An adapter whose effect shows, on all layers."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for module in modules:
        size = base.size(module)
        assert size is not None
        layers = [None] if module in (Module.EMBED_TOKENS, Module.LM_HEAD) else list(range(base.num_layers))
        for layer in layers:
            a = torch.randn(rank, size[1], generator=generator) * 0.2
            b = torch.randn(rank, size[0], generator=generator) * 0.2
            scales = torch.rand(size[0], generator=generator) + 0.5 if dora else None
            weights[Site(module, layer)] = HostWeights(a, b, 2.0, scales)
    return HostAdapter(seed.to_bytes(32, "big"), None, weights)

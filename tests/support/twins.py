"""The same sequences on a runner with graphs and on one without."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from planned import Driver, Planned, random_adapter

from mlserve.adapters.slots import AdapterSlots
from mlserve.adapters.spec import Module
from mlserve.model.base_weights import base_shape
from mlserve.model.decoder import Decoder
from mlserve.model.graphs import GraphOptions, GraphRecorder
from mlserve.model.plan import SlotLoad, StepResult
from mlserve.model.runner import ModelRunner

ATTENTION = (Module.Q_PROJ, Module.K_PROJ, Module.V_PROJ, Module.O_PROJ)
MLP = (Module.GATE_PROJ, Module.UP_PROJ, Module.DOWN_PROJ)
ENDS = (Module.EMBED_TOKENS, Module.LM_HEAD)
NUM_SLOTS, MAX_SEQS, BLOCK_SIZE = 3, 12, 4


class Rerun:
    """A recorder that counts. On a CPU a graph is the captured function, run again over the same memory."""

    def __init__(self, recorder: GraphRecorder | None = None) -> None:
        self.recorder = recorder
        self.num_captures = self.num_replays = 0

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.num_captures += 1
        graph = work if self.recorder is None else self.recorder.capture(work)

        def replay() -> None:
            self.num_replays += 1
            graph()

        return replay


class Twins:
    """The same sequences on a runner with graphs and on one without; every step must agree."""

    def __init__(
        self,
        decoder: Decoder,
        eager: Decoder | None = None,
        *,
        recorder: GraphRecorder | None = None,
        max_model_len: int = 64,
        tolerance: float = 1e-5,
    ) -> None:
        """`eager`: the model of the second, if it isn't that of the first. `recorder`: what makes the graphs."""
        self.recorder = Rerun(recorder)
        self.tolerance = tolerance
        self.base = base_shape(decoder.config)
        self.graphed = self._driver(decoder, GraphOptions(self.recorder, MAX_SEQS, max_model_len))
        self.eager = self._driver(eager or decoder, None)

    def _driver(self, decoder: Decoder, graphs: GraphOptions | None) -> Driver:
        slots = AdapterSlots(self.base, NUM_SLOTS, 4, torch.float32, decoder.device)
        return Driver(ModelRunner(decoder, 200, BLOCK_SIZE, torch.float32, slots, graphs=graphs))

    def load(self, slot: int, seed: int, modules: Sequence[Module], *, rank: int = 4, dora: bool = False) -> None:
        adapter = random_adapter(self.base, seed, rank=rank, modules=modules, dora=dora)
        for driver in (self.graphed, self.eager):
            driver.runner.adapters.write(slot, adapter)

    def start(self, prompt: Sequence[int], **how: object) -> tuple[Planned, Planned]:
        """A prefilled sequence in both worlds."""
        pair = (Planned(list(prompt), **how), Planned(list(prompt), **how))
        self.step([(pair, len(prompt))])
        return pair

    def step(self, chunks: Sequence[tuple[tuple[Planned, Planned], int]], loads: Sequence[SlotLoad] = ()) -> None:
        results = [
            driver.step([(pair[i], count) for pair, count in chunks], loads)
            for i, driver in enumerate((self.graphed, self.eager))
        ]
        assert_same(*results)
        both = [driver.runner.kv[1:] for driver in (self.graphed, self.eager)]
        # Padding wrote to block 0 alone.
        torch.testing.assert_close(*both, rtol=self.tolerance, atol=self.tolerance, equal_nan=True)

    def decode(self, pairs: Sequence[tuple[Planned, Planned]], times: int = 1) -> None:
        for _ in range(times):
            self.step([(pair, 1) for pair in pairs])

    def end(self, pair: tuple[Planned, Planned]) -> None:
        for driver, sequence in zip((self.graphed, self.eager), pair, strict=True):
            driver.end(sequence)


def assert_same(graphed: StepResult, eager: StepResult) -> None:
    assert graphed.token_ids == eager.token_ids
    for row, expected in eager.logprobs.items():
        found = graphed.logprobs[row]
        assert [token for token, _ in found.top] == [token for token, _ in expected.top]
        values = [[logprob for _, logprob in each.top] for each in (found, expected)]
        assert values[0] == pytest.approx(values[1], abs=1e-4)


def churn(twins: Twins, seed: int, num_steps: int) -> None:
    """Batches of all sizes, adapters of unequal rank in all mixes, slots written anew, sequences of many lengths."""
    rng = random.Random(seed)
    for slot in range(NUM_SLOTS):
        twins.load(slot, slot, ATTENTION + MLP if slot else ATTENTION, rank=slot + 2)
    running: list[tuple[Planned, Planned]] = []
    for step in range(num_steps):
        for pair in list(running):
            if rng.random() < 0.1 or len(pair[0].token_ids) > 50:
                running.remove(pair)
                twins.end(pair)
        while len(running) < MAX_SEQS and rng.random() < 0.4:
            slot = rng.choice([None, *range(NUM_SLOTS)])
            prompt = prompt_of(rng, rng.randrange(1, 20))
            running.append(twins.start(prompt, adapter_slot=slot, adapter_start=rng.choice([0, 0, 3, 30])))
        if step % 13 == 12:
            slot = rng.randrange(NUM_SLOTS)
            if all(pair[0].adapter_slot != slot for pair in running):
                twins.load(slot, 100 + step, ATTENTION, rank=rng.randrange(1, 5))
        rng.shuffle(running)
        if running:
            twins.decode(running)


def prompt_of(rng: random.Random, length: int) -> list[int]:
    """Random bytes."""
    return [rng.randrange(256) for _ in range(length)]

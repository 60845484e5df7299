"""Sixteen requests over eight adapters, beside the base model, one adapter, PEFT, and batches of equal adapters.

python tests/bench/bench_adapters.py [--runs 5] [--new 64 128] [--lora-dtype bfloat16] [--peft]

The embedded model, adapters of rank 8 on all seven projections with random weights, greedy, fixed lengths: 16 requests,
prompt 128, prefill included, for each number of new tokens. All mixes run side by side, step by step (lockstep.py).
`--peft` lets PEFT's `generate` do the same work in the same process after each round, mixed (`adapter_names`) and in
batches of equal adapters.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_serving import fixed, prompt, quartiles, transformers_twin
from lockstep import Batch, engines_over, lockstep
from random_adapters import write_adapter

from mlserve import LLM
from mlserve.config import DType

PROMPT = 128
NAMES = [f"a{i}" for i in range(16)]
MIXED, EQUAL = "8 adapters, 2 each", "only equal adapters in a batch"
MIXES: dict[str, list[str | None]] = {
    "base model": [None] * 16,
    MIXED: [NAMES[i // 2] for i in range(16)],
    "1 adapter": [NAMES[0]] * 16,
    "16 adapters": [*NAMES],
    "8 adapters, half base": [NAMES[i // 2] if i % 2 else None for i in range(16)],
}
INVOCATION = [1234, 5678]


@dataclass(frozen=True)
class Rate:
    """Output tokens/s: with prefill, and of the decode steps alone."""

    whole: float
    decode: float

    @classmethod
    def of(cls, batches: Sequence[Sequence[float]]) -> Rate:
        """Of the sixteen, in one batch or several one after the other, from the seconds of their steps."""
        new = len(batches[0])  # steps: all prompts of a batch are prefilled in the first, which gives the first tokens
        decoding = sum(sum(steps[1:]) for steps in batches)
        return cls(16 * new / sum(map(sum, batches)), 16 * (new - 1) / decoding)


class Mixed:
    """All mixes side by side in lockstep, and equal adapters only: eight batches of two."""

    def __init__(self, llm: LLM, new: int) -> None:
        self.new = new
        self._engines = engines_over(llm, dict.fromkeys([*MIXES, EQUAL], True))
        self._rounds = 0

    @staticmethod
    def num_blocks(new: int) -> int:
        """A pool that has room for all."""
        return (len(MIXES) + 1) * 17 * -(-(PROMPT + new) // 16)

    def run(self, rng: random.Random) -> dict[str, Rate]:
        """One round: every mix answers the same sixteen prompts."""
        prompts, params = [prompt(rng, PROMPT) for _ in range(16)], fixed(self.new)
        work = {mix: [Batch(prompts, params, names)] for mix, names in MIXES.items()}
        work[EQUAL] = [Batch(prompts[2 * i : 2 * i + 2], params, [NAMES[i]] * 2) for i in range(8)]
        self._rounds += 1
        return {mix: Rate.of(batches) for mix, batches in lockstep(self._engines, work, self._rounds).items()}


class Peft:
    """PEFT's `generate` on the same weights."""

    def __init__(self, folders: dict[str, Path], llm: LLM) -> None:
        from peft import PeftModel

        self._model: Any = PeftModel.from_pretrained(transformers_twin(llm), folders[NAMES[0]], adapter_name=NAMES[0])
        for name in NAMES[1:8]:
            self._model.load_adapter(folders[name], adapter_name=name)
        self._model.eval()

    def mixed(self, new: int) -> float:
        """Output tokens/s of PEFT's own mixed batch."""
        return self._rate(new, lambda: self._generate(16, new, adapter_names=MIXES[MIXED]))

    def only_equal(self, new: int) -> float:
        """The same in eight batches of two."""

        def run() -> None:
            for name in NAMES[:8]:
                self._model.set_adapter(name)
                self._generate(2, new)

        return self._rate(new, run)

    def _rate(self, new: int, run: Callable[[], None]) -> float:
        start = time.perf_counter()
        run()
        return 16 * new / (time.perf_counter() - start)

    def _generate(self, rows: int, new: int, **how: Any) -> None:
        import torch

        ids = torch.tensor([prompt(random.Random(row), PROMPT) for row in range(rows)])
        how |= {"do_sample": False, "min_new_tokens": new, "max_new_tokens": new, "pad_token_id": 0}
        with torch.inference_mode():
            self._model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **how)


def switch_ttft(llm: LLM, rng: random.Random, name: str) -> float:
    """TTFT on a context of 1,024 that the base model has seen, when an adapter takes over."""
    context = prompt(rng, 1024)
    llm.generate(context, fixed(1))
    seconds = llm.generate([*context, *INVOCATION, *prompt(rng, 6)], fixed(1), adapter=name)[0].metrics
    assert seconds.time_to_first_token is not None
    return seconds.time_to_first_token


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--new", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--lora-dtype", choices=[dtype.value for dtype in DType])
    parser.add_argument("--peft", action="store_true")
    options = parser.parse_args()
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as scratch:
        folders = {name: write_adapter(Path(scratch) / name, i) for i, name in enumerate(NAMES)}
        activated = write_adapter(Path(scratch) / "activated", 99, invocation_tokens=INVOCATION)
        adapters, blocks = folders | {"activated": activated}, Mixed.num_blocks(max(options.new))
        llm = LLM(adapters=adapters, max_loras=17, lora_dtype=options.lora_dtype, num_blocks=blocks)
        peft = Peft(folders, llm) if options.peft else None
        for new in options.new:
            report_batches(Mixed(llm, new), rng, options.runs, peft)
        report_switch(llm, rng, options.runs)


def report_batches(mixed: Mixed, rng: random.Random, runs: int, peft: Peft | None) -> None:
    """Mixes of adapters in one batch, and what they are compared with."""
    mixed.run(rng)
    rounds: list[dict[str, Rate]] = []
    theirs: dict[str, list[float]] = {"PEFT, adapter_names": [], f"PEFT, {EQUAL}": []}
    for _ in range(runs):
        rounds.append(mixed.run(rng))
        if peft is not None:
            for rates, run in zip(theirs.values(), (peft.mixed, peft.only_equal), strict=True):
                rates.append(run(mixed.new))
    whole = {mix: [rates[mix].whole for rates in rounds] for mix in rounds[0]}
    decode = {mix: [rates[mix].decode for rates in rounds] for mix in rounds[0]}
    print(
        f"16 requests, {mixed.new} new: output tokens/s, medians of {runs} (to the base model's, quartiles); decode "
        "steps alone"
    )
    for mix in whole:
        figures = (
            f"{statistics.median(rates[mix]):6.1f} ({ratio(rates[mix], rates['base model'])})"
            for rates in (whole, decode)
        )
        print(f"  {mix:30s} {'   '.join(figures)}")
    for ours, other in ((MIXED, "1 adapter"), ("16 adapters", "1 adapter"), (MIXED, EQUAL)):
        print(f"  {ours} / {other}: {ratio(whole[ours], whole[other])}; decode {ratio(decode[ours], decode[other])}")
    for peer, rates in theirs.items():
        if rates:
            print(f"  {peer:30s} {statistics.median(rates):6.1f}; {MIXED} / that {ratio(whole[MIXED], rates)}")


def report_switch(llm: LLM, rng: random.Random, runs: int) -> None:
    """The first token on a long context when an adapter takes over."""
    switch = {name: statistics.median(switch_ttft(llm, rng, name) for _ in range(runs)) for name in ("a0", "activated")}
    print(
        f"an adapter takes over a context of 1,024: first token after {switch['a0']:.3f} s with LoRA, "
        f"{switch['activated']:.3f} s with activated LoRA: {switch['a0'] / switch['activated']:.1f} times sooner"
    )


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """The median ratio round by round, and the quartiles."""
    return quartiles(a / b for a, b in zip(ours, theirs, strict=True))


if __name__ == "__main__":
    main()

"""Sixteen requests over eight adapters, beside the base model, one adapter, PEFT, and batches of equal adapters.

python tests/bench/bench_adapters.py [--runs 5] [--new 64] [--peft]

The embedded model, adapters of rank 8 on all seven projections with random weights, greedy, fixed lengths: 16 requests,
prompt 128, 64 new, prefill included. Ratios are of runs next to each other. `--peft` lets PEFT's `generate` do the same
work in the same process, mixed (`adapter_names`) and in batches of equal adapters.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_serving import fixed, prompt, transformers_twin
from random_adapters import write_adapter

from mlserve import LLM

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
class Load:
    """How much the sixteen ask for."""

    new: int

    def rates(self, batches: Iterable[tuple[float, float]]) -> tuple[float, float]:
        """Output tokens/s with prefill, and of the decode steps alone, of batches that ran one after the other."""
        whole, decoding = (sum(seconds) for seconds in zip(*batches, strict=True))
        return 16 * self.new / whole, 16 * (self.new - 1) / decoding

    def batch(self, llm: LLM, rng: random.Random, names: Sequence[str | None]) -> tuple[float, float]:
        """Seconds of one batch, and of its decode steps."""
        prompts = [prompt(rng, 128) for _ in names]
        start = time.perf_counter()
        outputs = llm.generate(prompts, fixed(self.new), adapter=names)
        seconds = time.perf_counter() - start
        first = max(output.metrics.first_token or 0.0 for output in outputs)
        return seconds, max(output.metrics.finished or 0.0 for output in outputs) - first

    def mixed(self, llm: LLM, rng: random.Random, names: Sequence[str | None]) -> tuple[float, float]:
        """All sixteen at once."""
        return self.rates([self.batch(llm, rng, names)])

    def only_equal(self, llm: LLM, rng: random.Random) -> tuple[float, float]:
        """Where a batch can only hold one adapter: eight batches of two, one after the other."""
        return self.rates(self.batch(llm, rng, [name] * 2) for name in NAMES[:8])


class Peft:
    """PEFT's `generate` on the same weights."""

    def __init__(self, folders: dict[str, Path], llm: LLM, new: int) -> None:
        from peft import PeftModel

        self._new = new
        self._model: Any = PeftModel.from_pretrained(transformers_twin(llm), folders[NAMES[0]], adapter_name=NAMES[0])
        for name in NAMES[1:8]:
            self._model.load_adapter(folders[name], adapter_name=name)
        self._model.eval()

    def mixed(self) -> float:
        """Output tokens/s of PEFT's own mixed batch."""
        return self._rate(lambda: self._generate(16, adapter_names=MIXES[MIXED]))

    def only_equal(self) -> float:
        """The same in eight batches of two."""

        def run() -> None:
            for name in NAMES[:8]:
                self._model.set_adapter(name)
                self._generate(2)

        return self._rate(run)

    def _rate(self, run: Callable[[], None]) -> float:
        start = time.perf_counter()
        run()
        return 16 * self._new / (time.perf_counter() - start)

    def _generate(self, rows: int, **how: Any) -> None:
        import torch

        ids = torch.tensor([prompt(random.Random(row), 128) for row in range(rows)])
        how |= {"do_sample": False, "min_new_tokens": self._new, "max_new_tokens": self._new, "pad_token_id": 0}
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
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--peft", action="store_true")
    options = parser.parse_args()
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as scratch:
        folders = {name: write_adapter(Path(scratch) / name, i) for i, name in enumerate(NAMES)}
        activated = write_adapter(Path(scratch) / "activated", 99, invocation_tokens=INVOCATION)
        llm = LLM(adapters=folders | {"activated": activated}, max_loras=17)
        peft = Peft(folders, llm, options.new) if options.peft else None
        report_batches(llm, rng, options.runs, Load(options.new), peft)
        report_switch(llm, rng, options.runs)


def report_batches(llm: LLM, rng: random.Random, runs: int, load: Load, peft: Peft | None) -> None:
    """Mixes of adapters in one batch, and what they are compared with."""
    for names in MIXES.values():
        load.mixed(llm, rng, names)
    figures: dict[str, list[tuple[float, float]]] = {mix: [] for mix in [*MIXES, EQUAL]}
    theirs: dict[str, list[float]] = {"PEFT, adapter_names": [], f"PEFT, {EQUAL}": []}
    for _ in range(runs):
        for mix in random.Random(rng.random()).sample(list(MIXES), len(MIXES)):
            figures[mix].append(load.mixed(llm, rng, MIXES[mix]))
        figures[EQUAL].append(load.only_equal(llm, rng))
        if peft is not None:
            for rates, run in zip(theirs.values(), (peft.mixed, peft.only_equal), strict=True):
                rates.append(run())
    print(
        f"16 requests, prompt 128, {load.new} new: output tokens/s, medians of {runs} "
        "(decode alone; ratio to the base model)"
    )
    for mix, pairs in figures.items():
        whole, decode = (statistics.median(pair[k] for pair in pairs) for k in (0, 1))
        to_base = [ratio(pairs, figures["base model"], k) for k in (0, 1)]
        print(f"  {mix:36s} {whole:6.1f} ({to_base[0]:.3f})   decode {decode:6.1f} ({to_base[1]:.3f})")
    mixed = figures[MIXED]
    print(f"  distinct / identical adapters: {ratio(figures['16 adapters'], figures['1 adapter'], 0):.3f}")
    beside = ratio(mixed, figures[EQUAL], 0), ratio(mixed, figures[EQUAL], 1)
    print(f"  8 adapters / {EQUAL}: {beside[0]:.2f}, decode alone {beside[1]:.2f}")
    for peer, rates in theirs.items():
        if rates:
            print(f"  {peer:36s} {statistics.median(rates):6.1f}; 8 adapters / that {whole_ratio(mixed, rates):.2f}")


def report_switch(llm: LLM, rng: random.Random, runs: int) -> None:
    """The first token on a long context when an adapter takes over."""
    switch = {name: statistics.median(switch_ttft(llm, rng, name) for _ in range(runs)) for name in ("a0", "activated")}
    print(
        f"an adapter takes over a context of 1,024: first token after {switch['a0']:.3f} s with LoRA, "
        f"{switch['activated']:.3f} s with activated LoRA: {switch['a0'] / switch['activated']:.1f} times sooner"
    )


def ratio(ours: list[tuple[float, float]], theirs: list[tuple[float, float]], k: int) -> float:
    """The median ratio of runs next to each other: `k` is 0 with prefill, 1 for decode steps alone."""
    return statistics.median(a[k] / b[k] for a, b in zip(ours, theirs, strict=True))


def whole_ratio(ours: list[tuple[float, float]], theirs: list[float]) -> float:
    """The same beside a peer, with prefill."""
    return statistics.median(a[0] / b for a, b in zip(ours, theirs, strict=True))


if __name__ == "__main__":
    main()

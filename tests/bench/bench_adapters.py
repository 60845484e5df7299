"""Sixteen requests over eight adapters, beside the base model, one adapter, PEFT, and batches of equal adapters.

python tests/bench/bench_adapters.py [--runs 5] [--peft]

The embedded model, adapters of rank 8 on all seven projections with random weights, greedy, fixed lengths: 16 requests,
prompt 128, 64 new, prefill included. Ratios are of runs next to each other. `--peft` lets PEFT's `generate` with
`adapter_names` do the same work in the same process.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_serving import Work, fixed, prompt, transformers_twin
from random_adapters import write_adapter

from mlserve import LLM

NAMES = [f"a{i}" for i in range(16)]
MIXES: dict[str, list[str | None]] = {
    "base model": [None] * 16,
    "8 adapters, 2 each": [NAMES[i // 2] for i in range(16)],
    "1 adapter": [NAMES[0]] * 16,
    "16 adapters": [*NAMES],
    "8 adapters, half base": [NAMES[i // 2] if i % 2 else None for i in range(16)],
}
INVOCATION = [1234, 5678]


def sixteen(llm: LLM, rng: random.Random, names: Sequence[str | None]) -> tuple[float, float]:
    """Output tokens/s with prefill, and of the decode steps alone."""
    prompts = [prompt(rng, 128) for _ in names]
    start = time.perf_counter()
    outputs = llm.generate(prompts, fixed(64), adapter=names)
    seconds = time.perf_counter() - start
    first = max(output.metrics.first_token or 0.0 for output in outputs)
    decoding = max(output.metrics.finished or 0.0 for output in outputs) - first
    return 64 * len(names) / seconds, 63 * len(names) / decoding


def only_equal(llm: LLM, rng: random.Random) -> float:
    """The same work where a batch can only hold one adapter: eight batches of two, one after the other."""
    start = time.perf_counter()
    for name in NAMES[:8]:
        llm.generate([prompt(rng, 128) for _ in range(2)], fixed(64), adapter=name)
    return 16 * 64 / (time.perf_counter() - start)


def peft_mixed(folders: dict[str, Path], llm: LLM) -> Work:
    """PEFT's own mixed batch on the same weights."""
    import torch
    from peft import PeftModel

    base = transformers_twin(llm)
    model = PeftModel.from_pretrained(base, folders[NAMES[0]], adapter_name=NAMES[0])
    for name in NAMES[1:8]:
        model.load_adapter(folders[name], adapter_name=name)
    model.eval()

    def run() -> float:
        rng = random.Random(7)
        ids = torch.tensor([prompt(rng, 128) for _ in range(16)])
        how: dict[str, Any] = {"do_sample": False, "min_new_tokens": 64, "max_new_tokens": 64, "pad_token_id": 0}
        start = time.perf_counter()
        with torch.inference_mode():
            names = MIXES["8 adapters, 2 each"]
            model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), adapter_names=names, **how)
        return 16 * 64 / (time.perf_counter() - start)

    return run


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
    parser.add_argument("--peft", action="store_true")
    options = parser.parse_args()
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as scratch:
        folders = {name: write_adapter(Path(scratch) / name, i) for i, name in enumerate(NAMES)}
        activated = write_adapter(Path(scratch) / "activated", 99, invocation_tokens=INVOCATION)
        llm = LLM(adapters=folders | {"activated": activated}, max_loras=17)
        peft = peft_mixed(folders, llm) if options.peft else None
        report(llm, rng, options.runs, peft)


def report(llm: LLM, rng: random.Random, runs: int, peft: Work | None) -> None:
    for names in MIXES.values():
        sixteen(llm, rng, names)
    figures: dict[str, list[tuple[float, float]]] = {mix: [] for mix in MIXES}
    equal, theirs = [], []
    for _ in range(runs):
        for mix in random.Random(rng.random()).sample(list(MIXES), len(MIXES)):
            figures[mix].append(sixteen(llm, rng, MIXES[mix]))
        equal.append(only_equal(llm, rng))
        if peft is not None:
            theirs.append(peft())
    print(
        f"16 requests, prompt 128, 64 new: output tokens/s, medians of {runs} (decode alone; ratio to the base model)"
    )
    for mix, pairs in figures.items():
        base = figures["base model"]
        ratios = [statistics.median(a[k] / b[k] for a, b in zip(pairs, base, strict=True)) for k in (0, 1)]
        whole, decode = (statistics.median(pair[k] for pair in pairs) for k in (0, 1))
        print(f"  {mix:32s} {whole:6.1f} ({ratios[0]:.3f})   decode {decode:6.1f} ({ratios[1]:.3f})")
    mixed = [pair[0] for pair in figures["8 adapters, 2 each"]]
    apart = [pair[0] for pair in figures["16 adapters"]]
    same = [pair[0] for pair in figures["1 adapter"]]
    print(f"  distinct / identical adapters: {median_ratio(apart, same):.3f}")
    for peer, rates in (("only equal adapters in a batch", equal), ("PEFT, adapter_names", theirs)):
        if rates:
            print(f"  {peer:32s} {statistics.median(rates):6.1f}; 8 adapters / that {median_ratio(mixed, rates):.2f}")
    switch = {name: statistics.median(switch_ttft(llm, rng, name) for _ in range(runs)) for name in ("a0", "activated")}
    print(
        f"an adapter takes over a context of 1,024: first token after {switch['a0']:.3f} s with LoRA, "
        f"{switch['activated']:.3f} s with activated LoRA: {switch['a0'] / switch['activated']:.1f} times sooner"
    )


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


if __name__ == "__main__":
    main()

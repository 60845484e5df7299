"""Throughput by the number of registered adapters, and what it costs to bring one in.

python tests/bench/bench_many_adapters.py [--adapters 1000] [--plot docs/many-adapters.png]

The embedded model; adapters of rank 8 on the attention's projections in bfloat16 (1.8 MB each) with random weights; 16
slots; 96 requests, prompt 64, 32 new, 16 at a time, whose adapters follow a Zipf law (exponent 1). Every count serves
the same prompts, first with nothing in host memory (adapters are read while the batch runs), then again.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import tempfile
import time
from itertools import accumulate
from pathlib import Path
from typing import cast

import torch
from random_adapters import ATTENTION, write_adapter

from mlserve import LLM, SamplingParams
from mlserve.adapters.host import HostAdapter
from mlserve.adapters.slots import AdapterSlots
from mlserve.model.runner import ModelRunner

NUM_REQUESTS = 96
PARAMS = SamplingParams(max_tokens=32, ignore_eos=True)
COUNTS = (1, 5, 16, 64, 256, 1000)


def slots_of(llm: LLM) -> AdapterSlots:
    """The device slots of an engine on a real model."""
    return cast(ModelRunner, llm.engine.runner).adapters


def zipf_names(rng: random.Random, count: int) -> list[str]:
    weights = list(accumulate(1 / (rank + 1) for rank in range(count)))
    return [f"a{i}" for i in rng.choices(range(count), cum_weights=weights, k=NUM_REQUESTS)]


def prompts(rng: random.Random) -> list[list[int]]:
    return [[rng.randrange(1000, 40000) for _ in range(64)] for _ in range(NUM_REQUESTS)]


def throughput(llm: LLM, rng: random.Random, names: list[str]) -> float:
    """Output tokens/s."""
    batch = prompts(rng)
    start = time.perf_counter()
    outputs = llm.generate(batch, PARAMS, adapter=names)
    assert all(output.error is None for output in outputs)
    return NUM_REQUESTS * 32 / (time.perf_counter() - start)


def serve(directory: Path, count: int, seed: int) -> dict[str, float]:
    """Throughput from files and from host memory, and how often a slot was written the second time."""
    llm = LLM(adapter_dir=str(directory), max_loras=16, max_num_seqs=16)
    llm.generate(prompts(random.Random(1))[:16], PARAMS)  # memory is touched, threads are up
    names = zipf_names(random.Random(seed), count)
    rng = random.Random(seed)
    figures = {"from files": throughput(llm, rng, names)}
    writes = 0
    slots = slots_of(llm)
    write = slots.write

    def counted(slot: int, adapter: HostAdapter) -> None:
        nonlocal writes
        writes += 1
        write(slot, adapter)

    slots.write = counted  # type: ignore[method-assign]  (it counts, and passes on)
    figures["from host memory"] = throughput(llm, rng, names)
    return figures | {"distinct": len(set(names)), "swaps": writes}


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmRSS")


def memory_per_adapter(directory: Path, count: int) -> float:
    """Growth of the process by adapter, over the size of its file."""
    llm = LLM(adapter_dir=str(directory))
    llm.load_adapter("a0")
    gc.collect()
    before = resident_bytes()
    for i in range(1, count):
        llm.load_adapter(f"a{i}")
    grown = resident_bytes() - before
    return grown / (count - 1) / (directory / "a0" / "adapter_model.safetensors").stat().st_size


def bring_in(directory: Path, runs: int) -> dict[str, float]:
    """Medians in seconds: TTFT of 64 tokens when the adapter is in a file, in host memory, in a slot; one swap."""
    llm = LLM(adapter_dir=str(directory), max_loras=1, enable_prefix_caching=False)
    rng = random.Random(5)
    first: dict[str, list[float]] = {"in a file": [], "in host memory": [], "in a slot": []}
    swaps = []
    for i in range(runs + 1):
        for where in first:
            if where == "in host memory":
                llm.generate(prompts(rng)[0], SamplingParams(max_tokens=1), adapter="a0")  # takes the only slot
            metrics = llm.generate(prompts(rng)[0], SamplingParams(max_tokens=1), adapter=f"a{i + 1}")[0].metrics
            first[where].append(metrics.time_to_first_token or 0.0)
        lease = llm.engine.adapters.lease(f"a{i + 1}")
        adapter = lease.poll()
        assert adapter is not None
        start = time.perf_counter()
        slots_of(llm).write(0, adapter)
        swaps.append(time.perf_counter() - start)
        llm.engine.scheduler.slots.forget(adapter.digest)
        lease.close()
    return {where: statistics.median(seconds[1:]) for where, seconds in (*first.items(), ("swap", swaps))}


def plot(path: Path, figures: dict[int, dict[str, float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for line in ("from host memory", "from files"):
        axes.plot(list(figures), [values[line] for values in figures.values()], marker="o", label=f"adapters {line}")
    axes.set_xscale("log")
    axes.set_xticks(list(figures), [f"{count:,}" for count in figures])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("registered adapters of rank 8 (Zipf traffic, 16 slots)")
    axes.set_ylabel("output tokens / s")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--adapters", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        for i in range(options.adapters):
            write_adapter(directory / f"a{i}", i, modules=ATTENTION, dtype=torch.bfloat16)
        counts = [count for count in COUNTS if count <= options.adapters]
        runs: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
        for run in range(options.runs):
            for count in counts:
                runs[count].append(serve(directory, count, run))
        figures = {
            count: {key: statistics.median(run[key] for run in found) for key in found[0]}
            for count, found in runs.items()
        }
        for count, values in figures.items():
            ratios = {
                key: statistics.median(a[key] / b[key] for a, b in zip(runs[count], runs[5], strict=True))
                for key in ("from host memory", "from files")
            }
            print(
                f"  {count:5,d} adapters, {values['distinct']:3.0f} asked for, {values['swaps']:3.0f} swaps: "
                f"{values['from host memory']:6.1f} tokens/s from host memory ({ratios['from host memory']:.3f} of 5), "
                f"{values['from files']:6.1f} from files ({ratios['from files']:.3f})"
            )
        print(f"  memory by adapter: {memory_per_adapter(directory, options.adapters):.3f} of its file")
        for where, seconds in bring_in(directory, 9).items():
            print(
                f"  {'one swap' if where == 'swap' else f'TTFT of 64 tokens, adapter {where}'}: {1e3 * seconds:.1f} ms"
            )
        if options.plot is not None:
            plot(options.plot, figures)


if __name__ == "__main__":
    main()

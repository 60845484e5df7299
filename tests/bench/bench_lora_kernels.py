"""What batched LoRA costs beside the linears it changes: `python -m tests.bench.bench_lora_kernels [--dtype bfloat16]`.

Shapes are SmolLM2-135M's, all linears of its 30 layers, each slot with an adapter of its own: matrices come from memory
as in a real step, inputs and outputs from the caches of whichever core wrote them. Figures are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mlserve.kernels import AdapterSegments, Linear, LoraSlots
from mlserve.kernels.cpu.ops import CpuOps
from tests.bench.bench_kernels import LAYERS
from tests.support.lora_batches import adapters_of_rows, segments_of

# Outputs of each slice of qkv, o, gate_up and down, and the inputs.
LINEARS = (((576, 192, 192), 576), ((576,), 576), ((1536, 1536), 576), ((576,), 1536))
SLOTS = 16


@dataclass(frozen=True, slots=True)
class Step:
    """All linears of the model, and what the adapters' slots add to each."""

    ops: CpuOps
    weights: list[Linear]
    adapters: list[LoraSlots]

    def run(self, rows: int, segments: AdapterSegments) -> tuple[float, float]:
        """Seconds in the linears, and in the LoRA calls that follow each."""
        inputs = {size: torch.randn(rows, size) for size in (576, 1536)}
        linears = lora_calls = 0.0
        for weight, lora in zip(self.weights, self.adapters, strict=True):
            x = inputs[weight.in_features]
            start = time.perf_counter()
            y = self.ops.linear(x, weight)
            between = time.perf_counter()
            self.ops.lora_expand_(self.ops.lora_shrink(x, lora, segments), lora, segments, y)
            end = time.perf_counter()
            linears += between - start
            lora_calls += end - between
        return linears, lora_calls


def stacks(rank: int, max_rank: int, dtype: torch.dtype) -> list[LoraSlots]:
    """The slots' matrices in the model's order; each kind of linear has one stack of all slots and layers."""
    kinds = []
    for out, size in LINEARS:
        a = torch.full((SLOTS, max_rank, LAYERS, len(out), size), 0.01, dtype=dtype).transpose(1, 3)
        b = torch.full((SLOTS, max_rank, LAYERS, sum(out)), 0.01, dtype=dtype)
        ranks = torch.full((SLOTS, len(out)), rank, dtype=torch.int32)
        starts = tuple(torch.tensor([0, *out]).cumsum(0).tolist())
        kinds.append([LoraSlots(a[:, :, layer], b[:, :, layer], ranks, starts) for layer in range(LAYERS)])
    return [lora for layer in zip(*kinds, strict=True) for lora in layer]


def bench(step: Step, name: str, slots: Sequence[int | None], seconds: float = 2.0) -> None:
    segments = segments_of(slots)
    step.run(len(slots), segments)
    runs: list[tuple[float, float]] = []
    while len(runs) < 3 or sum(map(sum, runs)) < seconds:
        runs.append(step.run(len(slots), segments))
    linears, lora = (statistics.median(taken) for taken in zip(*runs, strict=True))
    size = len(segments.slots) * sum(_bytes_of_one(lora) for lora in step.adapters)
    print(f"  {name:33} {linears * 1e3:9.2f} {lora * 1e3:9.2f}  {lora / linears:7.1%}  {size / lora * 1e-9:5.1f} GB/s")


def _bytes_of_one(lora: LoraSlots) -> int:
    rank = int(lora.ranks.max())
    return rank * lora.a.element_size() * (lora.a.shape[1] * lora.a.shape[3] + lora.b.shape[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="of adapters")
    dtype = getattr(torch, parser.parse_args().dtype)
    torch.manual_seed(0)
    ops = CpuOps()
    weights = [
        ops.pack_linear(torch.full((sum(out), size), 0.02, dtype=dtype)) for _ in range(LAYERS) for out, size in LINEARS
    ]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {dtype}")
    for rank, max_rank in ((8, 8), (8, 16), (16, 16)):
        step = Step(ops, weights, stacks(rank, max_rank, dtype))
        print(f"\nrank {rank} in slots of {max_rank}, ms a step                linears      LoRA    ratio")
        bench(step, "1 row", [0])
        bench(step, "16 rows, none", adapters_of_rows("none", 16, SLOTS))
        bench(step, "16 rows, 1 adapter", adapters_of_rows("one", 16, 8))
        bench(step, "16 rows, 8 adapters", adapters_of_rows("distinct", 16, 8))
        bench(step, "16 rows, 16 adapters", adapters_of_rows("distinct", 16, 16))
        bench(step, "16 rows, zipf of 16", adapters_of_rows("zipf", 16, 16))
        bench(step, "64 rows, 8 adapters", adapters_of_rows("distinct", 64, 8))
        bench(step, "prefill, 2048 rows, 8 adapters", [row // 256 for row in range(2048)])
        bench(step, "prefill 256 of one, 15 of others", [0] * 256 + list(range(1, 16)))


if __name__ == "__main__":
    main()

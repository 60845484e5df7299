"""What the kernels must at least move and compute, and how long a GPU takes for that at best: the roofline model
(Williams, Waterman and Patterson 2009).

    cost = lora_shrink(rows=64, adapters=16, slices=3, size=4096, rank=16)
    cost.seconds(H100)  # max(bytes / bandwidth, FLOPs / peak)

Bytes are the compulsory ones: every input read once from memory that no cache holds, every result written once. What an
implementation moves beyond that, such as partial sums, is not in a floor. FLOPs count a multiplication and an addition
as two. A floor is no forecast: launching a kernel takes microseconds that it doesn't have, and in a step small inputs
come from the L2 cache, where the kernel before has left them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "A100",
    "DEVICES",
    "H100",
    "H200",
    "LLAMA_3_8B",
    "LORA_RANK",
    "Cost",
    "Device",
    "Part",
    "Shape",
    "decode_step",
    "device_named",
    "lora_step",
    "prefill_step",
    "step_seconds",
]

FLOAT32, INT64 = 4, 8  # bytes
LORA_RANK = 16


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU by NVIDIA's data sheet."""

    name: str
    sheet: str
    bandwidth: float  # bytes a second, of its memory
    peak: float  # FLOPs a second, bfloat16 on tensor cores, without sparsity
    memory: int  # bytes
    marks: tuple[str, ...]  # any of these in the name that CUDA gives a device says that it is one

    @property
    def ridge(self) -> float:
        """FLOPs per byte from which on arithmetic is what bounds."""
        return self.peak / self.bandwidth


# Data sheets give H100 and H200 with sparsity, 1,979 TFLOPS: twice what dense matrices get.
A100 = Device("A100", "NVIDIA A100 80GB SXM", 2.039e12, 312e12, 80 * 10**9, ("A100-SXM4-80GB", "A100-SXM-80GB"))
H100 = Device("H100", "NVIDIA H100 SXM", 3.35e12, 989.5e12, 80 * 10**9, ("H100 80GB HBM3",))
H200 = Device("H200", "NVIDIA H200 SXM", 4.8e12, 989.5e12, 141 * 10**9, ("H200",))
DEVICES = (A100, H100, H200)


def device_named(name: str) -> Device | None:
    """The device that CUDA calls so; None for one whose figures aren't here."""
    return next((device for device in DEVICES if any(mark in name for mark in device.marks)), None)


@dataclass(frozen=True, slots=True)
class Cost:
    """What one call moves and computes."""

    bytes: int
    flops: int

    def seconds(self, device: Device) -> float:
        return max(self.bytes / device.bandwidth, self.flops / device.peak)

    def is_memory_bound(self, device: Device) -> bool:
        return self.bytes / device.bandwidth >= self.flops / device.peak


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder's sizes; weights, activations and KV take 2 bytes each."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    itemsize: int = 2

    @property
    def linears(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """A layer's fused weights: inputs, and outputs by slice."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "qkv": (self.hidden, (q, kv, kv)),
            "o": (q, (self.hidden,)),
            "gate_up": (self.hidden, (self.inner, self.inner)),
            "down": (self.inner, (self.hidden,)),
        }

    @property
    def kv_bytes(self) -> int:
        """One token's keys and values in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.itemsize

    @property
    def weight_bytes(self) -> int:
        per_layer = sum(size * sum(out) for size, out in self.linears.values())
        return self.itemsize * (self.layers * per_layer + 2 * self.vocabulary * self.hidden)

    def linear(self, rows: int, size: int, out: int) -> Cost:
        return Cost(self.itemsize * (rows * size + size * out + rows * out), 2 * rows * size * out)

    def embedding(self, rows: int) -> Cost:
        return Cost(rows * (INT64 + 2 * self.hidden * self.itemsize), 0)

    def rms_norm(self, rows: int) -> Cost:
        """x read, y written, and the weight, which is float32."""
        return Cost(2 * rows * self.hidden * self.itemsize + self.hidden * FLOAT32, 4 * rows * self.hidden)

    def add_rms_norm(self, rows: int) -> Cost:
        """x and residual read, residual and y written."""
        return Cost(4 * rows * self.hidden * self.itemsize + self.hidden * FLOAT32, 5 * rows * self.hidden)

    def kv_write(self, rows: int) -> Cost:
        return Cost(rows * (2 * self.kv_bytes + INT64), 0)

    def rope(self, rows: int) -> Cost:
        """q and k in place, by cosine and sine of half a head in float32."""
        rotated = (self.heads + self.kv_heads) * self.head_dim
        return Cost(rows * (2 * rotated * self.itemsize + self.head_dim * FLOAT32), 3 * rows * rotated)

    def rope_kv_write(self, rows: int) -> Cost:
        """As `rope` and `kv_write`, but k goes to the cache only, and is read once."""
        rope, width = self.rope(rows), self.kv_heads * self.head_dim * self.itemsize
        return Cost(rope.bytes + rows * (2 * width + INT64), rope.flops)

    def attention(self, queries: Sequence[int], contexts: Sequence[int]) -> Cost:
        """Causal: of each sequence the queries are the last of its context, whose keys are read once."""
        rows, heads = sum(queries), self.heads * self.head_dim
        seen = sum(n * context - n * (n - 1) // 2 for n, context in zip(queries, contexts, strict=True))
        return Cost(2 * rows * heads * self.itemsize + sum(contexts) * self.kv_bytes, 4 * seen * heads)

    def gated_activation(self, rows: int) -> Cost:
        return Cost(3 * rows * self.inner * self.itemsize, 6 * rows * self.inner)

    def sampling(self, rows: int) -> Cost:
        """One look at float32 logits: the least for any way of choosing."""
        return Cost(rows * (self.vocabulary * FLOAT32 + INT64), 2 * rows * self.vocabulary)

    def lora_shrink(self, rows: int, adapters: int, slices: int, size: int, rank: int) -> Cost:
        """x once for all slices, each adapter's A, float32 sums."""
        moved = self.itemsize * (rows * size + adapters * slices * rank * size) + FLOAT32 * rows * slices * rank
        return Cost(moved, 2 * rows * slices * rank * size)

    def lora_expand(self, rows: int, adapters: int, slices: int, out: int, rank: int) -> Cost:
        """float32 sums, each adapter's B, and y read and written."""
        moved = FLOAT32 * rows * slices * rank + self.itemsize * (adapters * rank * out + 2 * rows * out)
        return Cost(moved, 2 * rows * rank * out)


LLAMA_3_8B = Shape(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, inner=14336, vocabulary=128256)


@dataclass(frozen=True, slots=True)
class Part:
    """A kernel's share of a step: `count` calls of one cost."""

    name: str
    cost: Cost
    count: int

    def seconds(self, device: Device) -> float:
        return self.count * self.cost.seconds(device)


def decode_step(shape: Shape, rows: int, context: int) -> list[Part]:
    """All of a step in which `rows` sequences of that context get a token each, without adapters."""
    return _step(shape, [1] * rows, [context] * rows, rows)


def prefill_step(shape: Shape, tokens: int, context: int) -> list[Part]:
    """All of a step that computes the last `tokens` tokens of one prompt; one row of logits."""
    return _step(shape, [tokens], [context], 1)


def _step(shape: Shape, queries: Sequence[int], contexts: Sequence[int], logit_rows: int) -> list[Part]:
    rows, layers = sum(queries), shape.layers
    linears = [Part(name, shape.linear(rows, size, sum(out)), layers) for name, (size, out) in shape.linears.items()]
    return [
        Part("embedding", shape.embedding(rows), 1),
        Part("rms_norm", shape.rms_norm(rows), 2),
        Part("add_rms_norm", shape.add_rms_norm(rows), 2 * layers - 1),
        *linears,
        Part("rope_kv_write", shape.rope_kv_write(rows), layers),
        Part("paged_attention", shape.attention(queries, contexts), layers),
        Part("gated_activation", shape.gated_activation(rows), layers),
        Part("lm_head", shape.linear(logit_rows, shape.hidden, shape.vocabulary), 1),
        Part("sampling", shape.sampling(logit_rows), 1),
    ]


def lora_step(shape: Shape, rows: int, adapters: int, rank: int = LORA_RANK) -> list[Part]:
    """What adapters on all seven projections add to a step of so many rows."""
    parts = []
    for name, (size, out) in shape.linears.items():
        shrink = shape.lora_shrink(rows, adapters, len(out), size, rank)
        expand = shape.lora_expand(rows, adapters, len(out), sum(out), rank)
        parts += [
            Part(f"lora_shrink {name}", shrink, shape.layers),
            Part(f"lora_expand {name}", expand, shape.layers),
        ]
    return parts


def step_seconds(parts: Sequence[Part], device: Device) -> float:
    """Kernels run one after the other: each has its own floor."""
    return sum(part.seconds(device) for part in parts)

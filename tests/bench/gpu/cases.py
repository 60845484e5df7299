"""A kernel at one shape: what is run, what it must give, what it costs, and what torch has for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from roofline import LLAMA_3_8B, LORA_RANK, Cost, Shape
from torch import Tensor

__all__ = ["EXACT", "FULL", "Case", "Rig", "Scale", "Spec"]

EXACT = {"rtol": 0.0, "atol": 0.0}


@dataclass(frozen=True, slots=True)
class Scale:
    """How large everything is. Tests on a CPU have a small one."""

    shape: Shape
    rank: int
    num_slots: int
    batches: tuple[int, ...]  # of decoding; those that graphs are captured for need no padding
    contexts: tuple[int, ...]  # of decoding, in kernels
    step_context: int  # of decoding, in whole steps
    max_context_tokens: int  # of all sequences of a kernel's batch
    chunks: tuple[tuple[int, int], ...]  # of prompts: tokens of the step, context with them
    prefill_rows: int  # of kernels that know of no context
    adapters: tuple[int, ...]  # different ones in a batch
    prompt: int  # tokens, through the engine
    steps: int  # that a time is the median of
    block_size: int = 16


FULL = Scale(
    shape=LLAMA_3_8B,
    rank=LORA_RANK,
    num_slots=64,
    batches=(1, 8, 32, 64, 128, 256),
    contexts=(1024, 8192, 32768),
    step_context=1024,
    max_context_tokens=2**21,
    chunks=((2048, 2048), (2048, 8192), (8192, 8192)),
    prefill_rows=2048,
    adapters=(1, 4, 16, 64),
    prompt=8192,
    steps=20,
)


@dataclass(frozen=True, slots=True)
class Rig:
    """Where and how large."""

    device: torch.device
    dtype: torch.dtype  # of weights, activations and KV
    scale: Scale

    def randn(self, *shape: int, std: float = 1.0) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(0.0, std)


def _nothing() -> None:
    pass


def _as_it_is(result: Tensor) -> Tensor:
    return result


@dataclass(frozen=True, slots=True)
class Case:
    """One call of a kernel, over inputs that are on the device."""

    run: Callable[[], Tensor]
    expected: Callable[[], Tensor]  # by the reference, from inputs that `run` leaves alone
    cost: Cost
    tolerance: Mapping[str, float]
    reset: Callable[[], object] = _nothing  # before each run: puts back what it overwrites
    view: Callable[[Tensor], Tensor] = _as_it_is  # of a result: what of it is compared
    peers: Mapping[str, Callable[[], object]] = field(default_factory=dict)  # the same by other means


@dataclass(frozen=True, slots=True)
class Spec:
    """A case that is yet to be built: inputs take memory."""

    kernel: str
    shape: str
    build: Callable[[], Case]
    is_checked: bool = True
    is_timed: bool = True


Specs = Iterator[Spec]

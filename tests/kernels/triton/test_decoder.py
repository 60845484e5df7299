"""A whole decoder on Triton kernels against the same on plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from paged import PagedRun, PagedSequence
from tiny import write_tiny
from torch import Tensor

from mlserve.adapters.host import HostAdapter, HostWeights
from mlserve.adapters.slots import AdapterSlots
from mlserve.adapters.spec import Module, Site
from mlserve.config import ModelOptions
from mlserve.model.base_weights import base_shape
from mlserve.model.loader import LoadedModel, load_model

PROMPT = [7, 200, 31, 31, 64, 5, 90, 17, 111, 42, 3]
RANK = 3
TARGETS = {Module.Q_PROJ: (64, 64), Module.V_PROJ: (64, 32), Module.UP_PROJ: (64, 128), Module.DOWN_PROJ: (128, 64)}


def adapter() -> HostAdapter:
    """Of some projections of the tiny models' second layer."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    sites = {Site(module, 1): HostWeights(random(RANK, i), random(RANK, o), 1.5) for module, (i, o) in TARGETS.items()}
    return HostAdapter(b"adapter", None, sites)


def load(folder: Path, kernels: str, device: torch.device) -> LoadedModel:
    return load_model(ModelOptions(model=str(folder), device=device.type, kernels=kernels))


def logits_of_steps(model: LoadedModel) -> list[Tensor]:
    """`[T, V]` each: of a prefill of two sequences, then a chunk of one while the other decodes, then both decode."""
    slots = AdapterSlots(base_shape(model.config), 2, 8, torch.float32, model.decoder.device)
    slots.write(1, adapter())
    run = PagedRun(model.decoder, adapters=slots)
    long, short = PagedSequence([*PROMPT, 9, 8]), PagedSequence([*PROMPT[5:], 9, 8], adapter_slot=1)
    steps = ([(long, 6), (short, 6)], [(long, 5), (short, 1)], [(short, 1), (long, 1)])
    return [run.step(chunks).cpu() for chunks in steps]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_logits_are_the_references(family: str, tmp_path: Path, device: torch.device) -> None:
    """Together the families have biases, norms of heads, both activations, and windows."""
    folder = write_tiny(tmp_path, family)
    triton, reference = load(folder, "triton", device), load(folder, "reference", device)
    assert (triton.decoder.ops.name, reference.decoder.ops.name) == ("triton", "reference")
    for actual, expected in zip(logits_of_steps(triton), logits_of_steps(reference), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)

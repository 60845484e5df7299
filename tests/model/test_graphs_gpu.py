"""CUDA graphs of decode steps against the same steps without."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from planned import random_adapter
from twins import ATTENTION, ENDS, MAX_SEQS, MLP, NUM_SLOTS, Twins, churn, prompt_of

from mlserve.config import ModelOptions
from mlserve.model.decoder import Decoder
from mlserve.model.graphs import CudaGraphRecorder, padded_sizes
from mlserve.model.loader import load_model

pytestmark = pytest.mark.gpu

# Float32 sums in another order: cuBLAS picks its kernels by the number of rows, and padding changes that.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def decoder(tiny_model_dir: Path) -> Decoder:
    return load_model(ModelOptions(str(tiny_model_dir), device="cuda")).decoder


def graphs_against_eager(decoder: Decoder) -> Twins:
    return Twins(decoder, recorder=CudaGraphRecorder(decoder.device), tolerance=TOLERANCE)


@pytest.mark.parametrize("seed", range(3))
def test_replay_equals_eager(decoder: Decoder, seed: int) -> None:
    """LoRA in the graph: all mixes of adapters of unequal rank, slots written anew between replays."""
    twins = graphs_against_eager(decoder)
    churn(twins, seed, num_steps=60)
    assert twins.recorder.num_replays >= 50
    assert twins.recorder.num_captures <= 2 * len(padded_sizes(MAX_SEQS))


def test_adapters_of_all_linears(decoder: Decoder) -> None:
    rng, twins = random.Random(7), graphs_against_eager(decoder)
    for slot, modules in enumerate((ATTENTION, (*MLP, *ENDS), ENDS)):
        twins.load(slot, slot, modules)
    pairs = [twins.start(prompt_of(rng, 5), adapter_slot=slot) for slot in (*range(NUM_SLOTS), None)]
    twins.decode(pairs, times=5)
    for pair in pairs:
        twins.decode([pair])


def test_a_step_reads_nothing_back(decoder: Decoder) -> None:
    """Nothing from the inputs to the logits waits for the device: no load, no step with a graph, none without."""
    rng, twins = random.Random(8), graphs_against_eager(decoder)
    modules = (*ATTENTION, *ENDS)
    twins.load(0, 1, modules)
    twins.load(1, 2, modules, dora=True)
    pairs = [twins.start(prompt_of(rng, 5), adapter_slot=slot) for slot in (0, None)]
    twins.decode(pairs, times=2)
    with_dora = twins.start(prompt_of(rng, 5), adapter_slot=1)
    twins.decode([with_dora])
    runner = twins.graphed.runner
    adapter = random_adapter(twins.base, 3, modules=modules)
    assert runner._graphs is not None
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.inference_mode():
            runner.adapters.write(2, adapter)
            assert runner._graphs.logits(twins.graphed.inputs([pair[0] for pair in pairs])) is not None
            hidden = runner._forward(twins.graphed.inputs([pairs[0][0], with_dora[0]]), None)
            hidden.logits([0, 1])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_graphs_share_their_memory(decoder: Decoder) -> None:
    """All sizes together take little more than the largest alone."""
    rng, twins = random.Random(9), graphs_against_eager(decoder)
    pairs = [twins.start(prompt_of(rng, 3)) for _ in range(MAX_SEQS)]
    twins.decode(pairs)
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    for count in range(1, MAX_SEQS):
        twins.decode(pairs[:count])
    assert torch.cuda.memory_reserved() - before <= 64 * 2**20

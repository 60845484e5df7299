"""Decode steps as graphs. On a CPU a graph is the captured function, run again over the same memory."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from planned import Planned, random_adapter
from twins import ATTENTION, BLOCK_SIZE, ENDS, MAX_SEQS, MLP, NUM_SLOTS, Twins, churn, prompt_of

from mlserve.config import ModelOptions
from mlserve.model.decoder import Decoder
from mlserve.model.graphs import MAX_CONTEXT_TOKENS, padded_sizes
from mlserve.model.loader import load_model
from mlserve.model.plan import SlotLoad


@pytest.fixture(scope="module")
def decoder(tiny_model_dir: Path) -> Decoder:
    return load_model(ModelOptions(str(tiny_model_dir), kernels="reference", device="cpu")).decoder


def test_sizes() -> None:
    assert padded_sizes(1) == [1]
    assert padded_sizes(12) == [1, 2, 4, 8, 12]
    assert padded_sizes(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    assert padded_sizes(256)[-3:] == [240, 248, 256]
    assert padded_sizes(512)[-4:] == [320, 384, 448, 512]
    assert len(padded_sizes(1024)) == 47


@pytest.mark.parametrize("seed", range(3))
def test_batches_that_come_and_go(decoder: Decoder, seed: int) -> None:
    twins = Twins(decoder)
    churn(twins, seed, num_steps=40)
    assert twins.recorder.num_replays >= 35
    assert twins.recorder.num_captures <= 2 * len(padded_sizes(MAX_SEQS))


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, MAX_SEQS])
def test_a_step_is_padded_to_the_next_size(decoder: Decoder, count: int) -> None:
    rng, twins = random.Random(count), Twins(decoder)
    pairs = [twins.start(prompt_of(rng, 3 + i)) for i in range(count)]
    before = twins.recorder.num_replays  # a prompt of one token decodes too
    twins.decode(pairs, times=5)
    assert (twins.recorder.num_captures, twins.recorder.num_replays - before) == (1, 5)


def test_smaller_steps_after_larger_ones(decoder: Decoder) -> None:
    """What a larger step left in the inputs, of adapters and of block tables, is of no effect."""
    rng, twins = random.Random(5), Twins(decoder)
    for slot in range(NUM_SLOTS):
        twins.load(slot, slot, ATTENTION)
    pairs = [twins.start(prompt_of(rng, 20), adapter_slot=i % NUM_SLOTS) for i in range(MAX_SEQS)]
    twins.decode(pairs)
    base = twins.start(prompt_of(rng, 2))
    for count in (11, 9, 2, 1):
        twins.decode([base, *pairs[:count]])
        twins.decode([base])
    twins.decode(pairs)


def test_adapters_of_embedding_and_output_layer(decoder: Decoder) -> None:
    rng, twins = random.Random(6), Twins(decoder)
    twins.load(0, 1, ENDS)
    twins.load(1, 2, (*ENDS, *MLP))
    pairs = [twins.start(prompt_of(rng, 5), adapter_slot=slot) for slot in (1, None, 0, 1, None)]
    twins.decode(pairs, times=4)
    assert twins.recorder.num_replays == 4


def test_a_graph_serves_adapters_of_other_linears(decoder: Decoder) -> None:
    rng, twins = random.Random(7), Twins(decoder)
    for slot, modules in enumerate((ATTENTION, MLP, ENDS)):
        twins.load(slot, slot, modules)
    pairs = [twins.start(prompt_of(rng, 5), adapter_slot=slot) for slot in range(NUM_SLOTS)]
    for pair in (*pairs, *pairs):
        twins.decode([pair])
    assert twins.recorder.num_captures == 1


def test_memory_for_another_linear_makes_new_graphs(decoder: Decoder) -> None:
    rng, twins = random.Random(8), Twins(decoder)
    twins.load(0, 1, ATTENTION)
    base, first = twins.start(prompt_of(rng, 5)), twins.start(prompt_of(rng, 5), adapter_slot=0)
    twins.decode([base])
    twins.decode([base, first], times=2)
    assert twins.recorder.num_captures == 2  # without and with adapters
    twins.load(1, 2, MLP)
    second = twins.start(prompt_of(rng, 5), adapter_slot=1)
    twins.decode([first, second], times=2)
    assert twins.recorder.num_captures == 3
    twins.decode([base])
    assert twins.recorder.num_captures == 3  # that without adapters is kept
    twins.decode([base, first, second])
    assert twins.recorder.num_captures == 4
    graphs = twins.graphed.runner._graphs
    assert graphs is not None
    assert sorted(size for size, _ in graphs._graphs) == [1, 2, 4]  # those of the first layout are gone


def test_a_slot_that_is_loaded_by_the_step_itself(decoder: Decoder) -> None:
    rng, twins = random.Random(9), Twins(decoder)
    twins.load(0, 1, ATTENTION)
    pair = twins.start(prompt_of(rng, 6), adapter_slot=0)
    twins.decode([pair], times=2)
    other = random_adapter(twins.base, 50, modules=ATTENTION)
    twins.step([(pair, 1)], [SlotLoad(0, other)])
    twins.decode([pair])
    assert twins.recorder.num_captures == 1


def test_sampled_rows_alone_get_tokens(decoder: Decoder) -> None:
    """A prompt's last but one token, alone in a step: it decodes like the others, and has no logits."""
    rng, twins = random.Random(10), Twins(decoder)
    running = twins.start(prompt_of(rng, 6))
    late = (Planned(prompt := prompt_of(rng, 8)), Planned(list(prompt)))
    twins.step([(late, 6)])
    before = twins.recorder.num_replays
    twins.step([(late, 1)])
    twins.step([(late, 1), (running, 1)])
    assert twins.recorder.num_replays == before + 2
    twins.decode([late, running])


class ThreeAxes:
    """Positions of tokens that stand at a frame, row and column."""

    def chunk(self, start: int, end: int) -> NDArray[np.int64]:
        index = np.arange(start, end)
        return np.stack([index, index // 2, index % 5])


@pytest.mark.parametrize("sections", [(2, 3, 3), None], ids=["mrope", "one position"])
def test_sequences_with_positions_of_their_own(decoder: Decoder, sections: tuple[int, int, int] | None) -> None:
    ropes = tuple(replace(rope, sections=sections) for rope in decoder.config.ropes)
    other = Decoder(replace(decoder.config, ropes=ropes), decoder.weights, decoder.ops)
    rng, twins = random.Random(12), Twins(other)
    text, image = twins.start(prompt_of(rng, 5)), twins.start(prompt_of(rng, 9), rope_positions=ThreeAxes())
    twins.decode([text])
    twins.decode([image, text], times=3)
    twins.decode([text])
    assert (twins.recorder.num_captures, twins.recorder.num_replays) == (2, 5)


def test_what_is_not_captured(decoder: Decoder) -> None:
    rng, twins = random.Random(11), Twins(decoder, max_model_len=16)
    twins.load(0, 1, ATTENTION, dora=True)
    twins.load(1, 2, ATTENTION)
    dora, plain = (twins.start(prompt_of(rng, 5), adapter_slot=slot) for slot in (0, 1))
    new = (Planned(prompt := prompt_of(rng, 3)), Planned(list(prompt)))
    asks = tuple(Planned(list(prompt), wants_prompt_logprobs=True) for _ in range(2))
    many = [twins.start(prompt_of(rng, 2)) for _ in range(MAX_SEQS)]
    long = twins.start(prompt_of(rng, 13))
    twins.decode([dora, plain])
    twins.step([(plain, 1), (new, 3)])
    twins.decode([plain, *many])
    twins.step([(asks, 1), (plain, 1)])
    assert twins.recorder.num_captures == 0
    twins.decode([long], times=3)
    assert twins.recorder.num_captures == 1
    twins.decode([long])  # beyond max_model_len, where its blocks exceed what the graph was captured with
    assert twins.recorder.num_replays == 3
    twins.decode([plain])
    assert twins.recorder.num_replays == 4


def test_long_contexts_have_a_bounded_block_table(decoder: Decoder) -> None:
    twins = Twins(decoder, max_model_len=2**22)
    graphs = twins.graphed.runner._graphs
    assert graphs is not None
    assert graphs._capacity(1) == graphs._capacity(8) == MAX_CONTEXT_TOKENS // BLOCK_SIZE


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU, test_graphs_gpu does it with real graphs")
def test_triton_kernels_on_padded_inputs(decoder: Decoder, tiny_model_dir: Path) -> None:
    """In Triton's interpreter: what kernels find on the device, they find in padded steps too."""
    triton = load_model(ModelOptions(str(tiny_model_dir), kernels="triton", device="cpu")).decoder
    rng, twins = random.Random(7), Twins(triton, decoder)
    for slot, modules in enumerate((ATTENTION, MLP, ENDS)):
        twins.load(slot, slot, modules)
    pairs = [twins.start(prompt_of(rng, 5), adapter_slot=slot) for slot in (0, 1, 2)]
    twins.decode(pairs)
    twins.decode(pairs[:1])
    twins.decode([pairs[0], twins.start(prompt_of(rng, 2)), pairs[2]])
    assert (twins.recorder.num_captures, twins.recorder.num_replays) == (2, 3)

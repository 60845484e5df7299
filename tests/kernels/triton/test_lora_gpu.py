"""Batched LoRA in Triton on a GPU: real shapes, and inside a captured graph."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from lora_batches import adapters_of_rows, lora_slots, segments_of, within_ranks
from tolerances import TRITON, assert_close
from torch import Tensor

from mlserve.kernels import AdapterSegments, LoraSlots
from mlserve.kernels.reference import ReferenceOps
from mlserve.kernels.triton.lora_expand import lora_expand_
from mlserve.kernels.triton.lora_shrink import lora_shrink

pytestmark = pytest.mark.gpu

LLAMA_3_8B = {"qkv": (4096, [4096, 1024, 1024]), "gate_up": (4096, [14336, 14336]), "down": (14336, [4096])}
REFERENCE = ReferenceOps()


def llama_slots(linear: str, max_rank: int, dtype: torch.dtype, device: torch.device) -> LoraSlots:
    """Eight slots of different ranks."""
    size, out = LLAMA_3_8B[linear]
    ranks = [[max(1, max_rank >> shift)] * len(out) for shift in range(7)] + [[0] * len(out)]
    lora = lora_slots(ranks, max_rank, size, out, dtype, layers=1)
    return dataclasses.replace(lora, a=lora.a.to(device), b=lora.b.to(device), ranks=lora.ranks.to(device))


def on(device: torch.device, segments: AdapterSegments) -> AdapterSegments:
    return AdapterSegments(segments.order.to(device), segments.starts.to(device), segments.slots.to(device))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("max_rank", [16, 64, 256])
@pytest.mark.parametrize("linear", LLAMA_3_8B)
def test_llama_shapes(linear: str, max_rank: int, dtype: torch.dtype, device: torch.device) -> None:
    lora = llama_slots(linear, max_rank, dtype, device)
    for mix in ("one", "distinct", "zipf"):
        for rows in (1, 8, 32, 64, 256, 3000):  # each form
            segments = on(device, segments_of(adapters_of_rows(mix, rows, 8)))
            x = torch.randn(rows, lora.a.shape[3], dtype=dtype, device=device)
            y = torch.randn(rows, lora.b.shape[2], dtype=dtype, device=device)
            shrunk, expected = lora_shrink(x, lora, segments), REFERENCE.lora_shrink(x, lora, segments)
            used = within_ranks(expected, lora, segments)
            assert_close(within_ranks(shrunk, lora, segments), used, TRITON[torch.float32])
            total = y.float()
            REFERENCE.lora_expand_(expected, lora, segments, total)
            lora_expand_(shrunk, lora, segments, y)
            assert_close(y.float(), total, TRITON[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [32, 256, 2000])  # each form
def test_a_row_has_the_same_bits_wherever_it_stands(rows: int, dtype: torch.dtype, device: torch.device) -> None:
    lora = llama_slots("down", 64, dtype, device)
    x = torch.randn(rows, 14336, dtype=dtype, device=device)
    slots = adapters_of_rows("zipf", rows, 7)

    def changed(chosen: list[int]) -> Tensor:
        y = torch.zeros(rows, 4096, dtype=dtype, device=device)
        segments = on(device, segments_of([slots[row] for row in chosen]))
        lora_expand_(lora_shrink(x[chosen], lora, segments), lora, segments, y)
        return y[torch.tensor(chosen).argsort()]

    assert torch.equal(changed([*range(rows)]), changed(torch.randperm(rows).tolist()))


def pad_(room: AdapterSegments, segments: AdapterSegments) -> None:
    """Write segments into room for more rows and more segments."""
    room.order[: len(segments.order)] = segments.order
    room.starts.copy_(segments.starts[-1].repeat(len(room.starts)))
    room.starts[: len(segments.starts)] = segments.starts
    room.slots[: len(segments.slots)] = segments.slots


@pytest.mark.parametrize("rows", [16, 128])  # decoding, in two forms
@pytest.mark.parametrize("linear", ["qkv", "down"])
def test_a_captured_graph_serves_any_adapters(linear: str, rows: int, device: torch.device) -> None:
    lora = llama_slots(linear, 16, torch.bfloat16, device)
    x = torch.randn(rows, lora.a.shape[3], dtype=torch.bfloat16, device=device)
    y = torch.zeros(rows, lora.b.shape[2], dtype=torch.bfloat16, device=device)
    room = on(device, AdapterSegments(torch.zeros(rows).long(), torch.zeros(9).int(), torch.zeros(8).int()))
    lora_expand_(lora_shrink(x, lora, room), lora, room, y)  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lora_expand_(lora_shrink(x, lora, room), lora, room, y)
    for mix in ("none", "one", "zipf", "distinct", "skewed", "none"):
        segments = on(device, segments_of(adapters_of_rows(mix, rows, 8)))
        pad_(room, segments)
        x.copy_(torch.randn_like(x))
        y.copy_(torch.randn_like(y))
        expected, total = y.clone(), y.float()
        lora_expand_(lora_shrink(x, lora, room), lora, room, expected)
        REFERENCE.lora_expand_(REFERENCE.lora_shrink(x, lora, segments), lora, segments, total)
        graph.replay()
        assert torch.equal(y, expected)
        assert_close(y.float(), total, TRITON[torch.bfloat16])

"""What kernels cost at least, and the tables of docs/kernels.md that are computed from it."""

from __future__ import annotations

import re

import pytest
import torch
from kernels_page import BATCHES, PAGE, TABLES, updated
from lora_batches import adapters_of_rows, lora_slots, segments_of
from roofline import (
    A100,
    DEVICES,
    H100,
    H200,
    LLAMA_3_8B,
    Cost,
    Part,
    Shape,
    decode_step,
    device_named,
    lora_step,
    prefill_step,
    step_seconds,
)

from mlserve.kernels.triton.configs import Launch
from mlserve.kernels.triton.lora_expand import lora_expand_
from mlserve.kernels.triton.lora_shrink import lora_shrink

BF16 = torch.bfloat16
TINY = Shape(layers=3, hidden=64, heads=4, kv_heads=2, head_dim=16, inner=96, vocabulary=320)
NUM_PARAMETERS = 8_030_261_248  # of Llama-3-8B


def test_the_shape_is_llamas() -> None:
    norms = (2 * LLAMA_3_8B.layers + 1) * LLAMA_3_8B.hidden
    assert LLAMA_3_8B.weight_bytes == 2 * (NUM_PARAMETERS - norms)
    assert LLAMA_3_8B.layers * LLAMA_3_8B.kv_bytes == 128 * 1024  # bytes a token


def test_floors() -> None:
    assert Cost(3_350_000, 1).seconds(H100) == pytest.approx(1e-6)
    assert Cost(1, 989_500_000).seconds(H100) == pytest.approx(1e-6)
    assert [round(device.ridge) for device in DEVICES] == [153, 295, 206]
    assert Cost(10**6, int(A100.ridge * 10**6)).is_memory_bound(A100)
    assert not Cost(10**6, int(A100.ridge * 10**6) + 1000).is_memory_bound(A100)


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA H200", H200),
        ("NVIDIA H100 80GB HBM3", H100),
        ("NVIDIA A100-SXM4-80GB", A100),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA A100-SXM4-40GB", None),
    ],
)
def test_devices_by_cudas_names(name: str, device: object) -> None:
    assert device_named(name) is device


def test_bytes_are_those_of_the_tensors() -> None:
    rows, rank = 6, 4
    x, y, kv = (torch.empty(rows, width, dtype=BF16) for width in (64, 64, 2 * 2 * 16))
    weight = torch.empty(64)
    cos, slot_mapping = torch.empty(2, rows, 8), torch.empty(rows, dtype=torch.int64)
    q, k = torch.empty(rows, 4, 16, dtype=BF16), torch.empty(rows, 2, 16, dtype=BF16)
    assert TINY.rms_norm(rows).bytes == x.nbytes + y.nbytes + weight.nbytes
    assert TINY.add_rms_norm(rows).bytes == 2 * x.nbytes + 2 * y.nbytes + weight.nbytes
    assert TINY.kv_write(rows).bytes == 2 * kv.nbytes + slot_mapping.nbytes
    assert TINY.rope(rows).bytes == 2 * (q.nbytes + k.nbytes) + cos.nbytes
    assert TINY.rope_kv_write(rows).bytes == 2 * (q.nbytes + kv.nbytes) + cos.nbytes + slot_mapping.nbytes
    assert TINY.gated_activation(rows).bytes == 3 * 2 * rows * 96
    assert TINY.linear(rows, 64, 96).bytes == x.nbytes + 2 * 64 * 96 + 2 * rows * 96

    segments = segments_of(adapters_of_rows("distinct", rows, 3))
    lora = lora_slots([[rank] * 3] * 3, rank, 64, (64, 32, 32), BF16, layers=1)
    shrunk, out = torch.empty(rows, 3, rank), torch.empty(rows, 128, dtype=BF16)
    assert len(segments.slots) == 3
    assert TINY.lora_shrink(rows, 3, 3, 64, rank).bytes == x.nbytes + lora.a.nbytes + shrunk.nbytes
    assert TINY.lora_expand(rows, 3, 3, 128, rank).bytes == shrunk.nbytes + lora.b.nbytes + 2 * out.nbytes


def test_flops_of_attention_are_of_what_is_seen() -> None:
    """Query i of n sees context - n + 1 + i keys; each costs a product with k and one with v."""
    seen = sum(20 - 5 + 1 + i for i in range(5)) + 7
    assert TINY.attention([5, 1], [20, 7]).flops == 2 * 2 * seen * 4 * 16
    assert TINY.attention([5, 1], [20, 7]).bytes == 2 * 6 * 64 * 2 + 27 * TINY.kv_bytes


def test_a_step_is_the_sum_of_its_parts() -> None:
    parts = [Part("one", Cost(3_350_000, 0), 3), Part("other", Cost(0, 989_500_000), 2)]
    assert step_seconds(parts, H100) == pytest.approx(5e-6)
    decode = {part.name: part for part in decode_step(TINY, 4, 10)}
    assert decode["paged_attention"].cost == TINY.attention([1] * 4, [10] * 4)
    assert decode["paged_attention"].count == 3
    assert decode["add_rms_norm"].count == 5  # two a layer, but for the first, which has nothing to add
    prefill = {part.name: part for part in prefill_step(TINY, 8, 20)}
    assert prefill["paged_attention"].cost == TINY.attention([8], [20])
    assert prefill["lm_head"].cost == TINY.linear(1, 64, 320)
    added = lora_step(TINY, 4, 2, rank=4)
    assert len(added) == 8
    assert {part.count for part in added} == {3}


@pytest.mark.parametrize(("rows", "launches"), [(1, 9), (32, 9), (33, 12), (256, 12)])
def test_launches_of_adapters_in_a_layer(rows: int, launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the page says: at most 32 rows take splits of `in` for down_proj alone, more rows for all four linears."""
    found: list[Launch] = []
    monkeypatch.setattr(Launch, "run", lambda launch: found.append(launch))
    rank, segments = 16, segments_of([0] * rows)
    for size, out in LLAMA_3_8B.linears.values():
        lora = lora_slots([[0] * len(out)], rank, size, out, BF16, layers=1)
        shrunk = lora_shrink(torch.empty(rows, size, dtype=BF16), lora, segments)
        lora_expand_(shrunk, lora, segments, torch.empty(rows, sum(out), dtype=BF16))
    assert len(found) == launches


def test_the_pages_tables_are_current() -> None:
    """`python tests/bench/kernels_page.py --write` makes them so, after changes of kernels too."""
    page = PAGE.read_text()
    assert re.findall(r"<!-- table: (\w+) -->", page) == [*TABLES]
    assert updated(page) == page


def test_tables_are_put_between_their_marks_alone() -> None:
    page = "before\n<!-- table: devices -->\nold\n<!-- end -->\nafter | x |\n"
    head, table, tail = updated(page).partition(TABLES["devices"]())
    assert table
    assert head == "before\n<!-- table: devices -->\n\n"
    assert tail == "\n\n<!-- end -->\nafter | x |\n"
    with pytest.raises(KeyError):
        updated(page.replace("devices", "others"))


def test_cells_are_the_costs() -> None:
    row = next(line for line in TABLES["decode_h100"]().splitlines() if line.startswith("| lm_head "))
    expected = [LLAMA_3_8B.linear(rows, 4096, 128256).seconds(H100) * 1e6 for rows in BATCHES]
    assert [float(cell) for cell in row.strip("| ").split(" | ")[1:]] == pytest.approx(expected, rel=5e-3)
    attention = TABLES["decode_attention"]().splitlines()
    assert attention[-1].startswith("| 32,768 | H200 | 28 | 224 | – |")  # 32 x 32,768 tokens take 137 GB

"""Batched LoRA in Triton against the reference. What must not be read is NaN or out of reach: other layers, all beyond
a slot's rank, scratch memory, rows of the base model and, where segments are padded, what comes after the last one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from lora_batches import adapters_of_rows, lora_slots, segments_of, within_ranks
from tolerances import LINEAR, TRITON, assert_close
from torch import Tensor

from mlserve.kernels import AdapterSegments, LoraSlots
from mlserve.kernels.reference import ReferenceOps
from mlserve.kernels.triton import lora_segments
from mlserve.kernels.triton.lora_expand import lora_expand_
from mlserve.kernels.triton.lora_segments import Form
from mlserve.kernels.triton.lora_shrink import lora_shrink

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MIXES = ("one", "distinct", "zipf", "none")
# Ranks of the three slices of five slots: equal and unequal ones, multiples of 4 and not, slices left alone.
RANKS = [[8, 8, 8], [1, 13, 3], [16, 0, 5], [0, 0, 0], [10, 2, 7]]
QKV = (48, 19, 37)
FORMS = {Form.ROW: (1 << 20, 1 << 20), Form.SMALL: (0, 1 << 20), Form.LARGE: (0, 0)}  # the limits that choose it
REFERENCE = ReferenceOps()


def use(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a form at any number of rows: as many as it is for would take minutes in the interpreter."""
    monkeypatch.setattr(lora_segments, "MAX_SINGLE_ROWS", FORMS[form][0])
    monkeypatch.setattr(lora_segments, "MAX_SMALL_ROWS", FORMS[form][1])


@pytest.fixture(params=Form)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Form:
    chosen: Form = request.param
    use(chosen, monkeypatch)
    return chosen


def on(device: torch.device, lora: LoraSlots, segments: AdapterSegments) -> tuple[LoraSlots, AdapterSegments]:
    lora = dataclasses.replace(lora, a=lora.a.to(device), b=lora.b.to(device), ranks=lora.ranks.to(device))
    return lora, AdapterSegments(segments.order.to(device), segments.starts.to(device), segments.slots.to(device))


def check(x: Tensor, y: Tensor, lora: LoraSlots, segments: AdapterSegments) -> None:
    """Each operation against the reference's. Leaves y as the kernels made it."""
    shrunk, expected = lora_shrink(x, lora, segments), REFERENCE.lora_shrink(x, lora, segments)
    assert shrunk.dtype == torch.float32
    assert shrunk.shape == expected.shape
    assert_close(within_ranks(shrunk, lora, segments), within_ranks(expected, lora, segments), LINEAR)
    total = y.float()
    REFERENCE.lora_expand_(expected, lora, segments, total)
    lora_expand_(shrunk, lora, segments, y)
    assert_close(y.float(), total, TRITON[y.dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 7, 61])
@pytest.mark.parametrize("mix", MIXES)
def test_mixed_batches(form: Form, mix: str, rows: int, dtype: torch.dtype, device: torch.device) -> None:
    if form is Form.ROW:
        rows = min(rows, 5)  # each is 24 programs, and a program takes milliseconds in the interpreter
    slots = adapters_of_rows(mix, rows, len(RANKS))
    lora, segments = on(device, lora_slots(RANKS, 16, 72, QKV, dtype), segments_of(slots))
    x = torch.randn(rows, 72, dtype=dtype, device=device)
    y = torch.randn(rows, sum(QKV), dtype=dtype, device=device)
    x[[slot is None for slot in slots]] = torch.nan
    before = y.clone()
    check(x, y, lora, segments)
    alone = [slot is None or not any(RANKS[slot]) for slot in slots]
    assert torch.equal(y[alone], before[alone])


@pytest.mark.parametrize(
    ("size", "out", "rank", "dtype"),
    [
        (1, [1], 1, torch.float32),
        (5, [3, 300], 8, torch.float16),
        (31, [257], 16, torch.float32),
        (576, [33, 1], 64, torch.bfloat16),
        (1537, [8], 17, torch.float16),
        (5000, [130], 4, torch.bfloat16),  # several splits in each form
        (5000, [10], 4, torch.float32),
        (40, [100], 256, torch.float32),
    ],
    ids=str,
)
def test_any_width_and_rank(
    form: Form, size: int, out: list[int], rank: int, dtype: torch.dtype, device: torch.device
) -> None:
    ranks = [[rank] * len(out), [max(1, rank // 2)] * len(out)]
    lora, segments = on(device, lora_slots(ranks, rank, size, out, dtype), segments_of([0, None, 1, 0]))
    x, y = torch.randn(4, size, device=device), torch.randn(4, sum(out), device=device)
    check(x.to(dtype), y.to(dtype), lora, segments)


def test_rows_may_be_strided_and_matrices_spaced(form: Form, device: torch.device) -> None:
    lora, segments = on(device, lora_slots(RANKS, 16, 24, QKV, torch.float32), segments_of([1, 0, 1, 1, None, 4]))
    spaced_a = torch.full((5, 3, 16, 31), torch.nan, device=device)
    spaced_b = torch.full((5, 16, 150), torch.nan, device=device)
    spaced_a[..., 3:27], spaced_b[..., 5:109] = lora.a, lora.b
    lora = dataclasses.replace(lora, a=spaced_a[..., 3:27], b=spaced_b[..., 5:109])
    x, wide_y = torch.randn(6, 2, 24, device=device)[:, 1], torch.randn(6, 3, 104, device=device)
    before = wide_y.clone()
    check(x, wide_y[:, 1], lora, segments)
    assert torch.equal(wide_y[:, ::2], before[:, ::2])


def test_a_row_of_nan_stays_alone(form: Form, device: torch.device) -> None:
    lora, segments = on(device, lora_slots([[5]], 5, 16, [33], torch.float32), segments_of([0] * 8))
    x, y = torch.randn(8, 16, device=device), torch.zeros(8, 33, device=device)
    x[3, 5] = torch.nan
    lora_expand_(lora_shrink(x, lora, segments), lora, segments, y)
    assert y.isnan().all(1).tolist() == [row == 3 for row in range(8)]
    assert y.isnan().any(1).tolist() == [row == 3 for row in range(8)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_in_any_batch(form: Form, dtype: torch.dtype, device: torch.device) -> None:
    rows, ranks = 18, [[8], [17], [4]]
    lora = lora_slots(ranks, 17, 1100, [70], dtype)
    x = torch.randn(rows, 1100, dtype=dtype, device=device)
    y = torch.randn(rows, 70, dtype=dtype, device=device)

    def changed(x: Tensor, y: Tensor, slots: list[int | None]) -> Tensor:
        y = y.clone()
        device_lora, segments = on(device, lora, segments_of(slots))
        lora_expand_(lora_shrink(x, device_lora, segments), device_lora, segments, y)
        return y

    slots = adapters_of_rows("skewed", rows, len(ranks))
    together = changed(x, y, slots)
    for row in (0, 7, 17):
        assert torch.equal(together[row], changed(x[row, None], y[row, None], [slots[row]])[0])


def padded(segments: AdapterSegments, rows: int, count: int) -> AdapterSegments:
    """Room for `rows` rows in `count` segments. What is added is out of reach: it must not be looked at."""
    nowhere = 2**30
    order = torch.full((rows,), nowhere, dtype=torch.int64, device=segments.order.device)
    starts = segments.starts[-1].repeat(count + 1)
    slots = torch.full((count,), nowhere, dtype=torch.int32, device=segments.slots.device)
    order[: len(segments.order)] = segments.order
    starts[: len(segments.starts)] = segments.starts
    slots[: len(segments.slots)] = segments.slots
    return AdapterSegments(order, starts, slots)


@pytest.mark.parametrize("slots", [[None, 1, 1, 0, None, 4, 0], [None, None]], ids=["some", "none"])
def test_padded_segments(form: Form, slots: list[int | None], device: torch.device) -> None:
    lora, segments = on(device, lora_slots(RANKS, 16, 72, QKV, torch.float32), segments_of(slots))
    x, y = torch.randn(len(slots), 72, device=device), torch.randn(len(slots), sum(QKV), device=device)
    exact, wide = y.clone(), padded(segments, 20, 7)
    lora_expand_(lora_shrink(x, lora, segments), lora, segments, exact)
    shrunk = lora_shrink(x, lora, wide)
    assert shrunk.shape == (20, 3, 16)
    lora_expand_(shrunk, lora, wide, y)
    assert torch.equal(y, exact)


def test_empty_segments_between_others(form: Form, device: torch.device) -> None:
    lora, segments = on(device, lora_slots(RANKS, 16, 72, QKV, torch.float32), segments_of([0, 0, 1]))
    starts = torch.tensor([0, 0, 2, 2, 3, 3], dtype=torch.int32, device=device)
    order, slots = segments.order, [3, segments.slots[0], 2, segments.slots[1], 4]
    spread = AdapterSegments(order, starts, torch.tensor(slots, dtype=torch.int32, device=device))
    check(torch.randn(3, 72, device=device), torch.randn(3, sum(QKV), device=device), lora, spread)


def test_more_segments_than_the_narrowest_search(form: Form, device: torch.device) -> None:
    used = [3, 63, 64, 69]
    lora, _ = on(device, lora_slots([[3]] * 70, 3, 8, [9], torch.float32), segments_of([]))
    starts = torch.tensor([sum(slot < g for slot in used) for g in range(71)], dtype=torch.int32, device=device)
    order = torch.tensor([2, 0, 3, 1], device=device)
    sparse = AdapterSegments(order, starts, torch.arange(70, dtype=torch.int32, device=device))
    check(torch.randn(4, 8, device=device), torch.randn(4, 9, device=device), lora, sparse)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"a": torch.zeros(2, 2, 4, 9)}, r"x must be \[T, 9\]"),
        ({"a": torch.zeros(2, 2, 8, 4).mT}, "dense along in"),
        ({"b": torch.zeros(2, 16, 4).mT}, "b along out"),
        ({"ranks": torch.zeros(2, 3, dtype=torch.int32)}, r"ranks must be \[slots, slices\]"),
        ({"ranks": torch.zeros(2, 2, dtype=torch.int32, device="meta")}, "keep them together"),
        ({"out_starts": (0, 6)}, r"ranks must be \[slots, slices\]"),
        ({"out_starts": (0, 6, 17)}, r"y must be \[T, 17\]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_slots_are_refused(changed: dict[str, Any], message: str) -> None:
    lora, segments = lora_slots([[4, 2], [3, 4]], 4, 8, [6, 10], torch.float32), segments_of([0, 1, None, 1])
    wrong, y = dataclasses.replace(lora, **changed), torch.zeros(4, 16)
    with pytest.raises(ValueError, match=message):
        lora_expand_(lora_shrink(torch.randn(4, 8), wrong, segments), wrong, segments, y)
    assert not y.any()


def test_wrong_segments_are_refused() -> None:
    lora, segments = lora_slots([[4]], 4, 8, [6], torch.float32), segments_of([0, 0])
    with pytest.raises(ValueError, match="one more than slots"):
        lora_shrink(torch.randn(2, 8), lora, dataclasses.replace(segments, starts=segments.starts[:1]))
    with pytest.raises(ValueError, match="shrunk must be"):
        lora_expand_(torch.zeros(3, 1, 4), lora, segments, torch.zeros(2, 6))

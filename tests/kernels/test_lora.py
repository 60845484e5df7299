"""Batched LoRA against float64 sums, row by row. What must not be read is NaN: other layers, all beyond a slot's rank,
scratch memory, and rows of the base model."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from lora_batches import MIXES, adapters_of_rows, lora_slots, segments_of, within_ranks
from tolerances import LINEAR, assert_close
from torch import Tensor

from mlserve.kernels import Activation, AdapterSegments, LoraSlots, Ops
from mlserve.kernels.cpu.ops import CpuOps
from mlserve.kernels.reference import ReferenceOps

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Ranks of the three slices of seven slots: equal and unequal ones, multiples of 4 and not, slices left alone.
RANKS = [[8, 8, 8], [1, 64, 3], [16, 0, 5], [0, 0, 7], [4, 2, 33], [64, 64, 64], [0, 0, 0]]
QKV = (48, 19, 37)


@pytest.fixture(params=[ReferenceOps, CpuOps], ids=["reference", "cpu"], scope="module")
def ops(request: pytest.FixtureRequest) -> Ops:
    made: Ops = request.param()
    return made


def apply(ops: Ops, x: Tensor, lora: LoraSlots, segments: AdapterSegments, y: Tensor) -> Tensor:
    """y after both operations."""
    y = y.clone()
    ops.lora_expand_(ops.lora_shrink(x, lora, segments), lora, segments, y)
    return y


def expected_shrunk(x: Tensor, lora: LoraSlots, segments: AdapterSegments) -> Tensor:
    """`[N, K, R]`, with zeros beyond ranks."""
    shrunk = torch.zeros(len(segments.order), *lora.a.shape[1:3], dtype=torch.float64)
    for n, row, slot in rows_of(segments):
        for k, rank in enumerate(lora.ranks[slot].tolist()):
            shrunk[n, k, :rank] = lora.a[slot, k, :rank].double() @ x[row].double()
    return shrunk


def expected_sum(shrunk: Tensor, lora: LoraSlots, segments: AdapterSegments, y: Tensor) -> Tensor:
    total = y.double()
    for n, row, slot in rows_of(segments):
        for k, rank in enumerate(lora.ranks[slot].tolist()):
            columns = slice(*lora.out_starts[k : k + 2])
            total[row, columns] += shrunk[n, k, :rank].double() @ lora.b[slot, :rank, columns].double()
    return total.float()


def rows_of(segments: AdapterSegments) -> list[tuple[int, int, int]]:
    """(place in order, row of the step, slot) of all rows that have an adapter."""
    slots = segments.slots.repeat_interleave(segments.starts.diff().long()).tolist()
    return [(n, row, slot) for n, (row, slot) in enumerate(zip(segments.order.tolist(), slots, strict=True))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 7, 133])
@pytest.mark.parametrize("mix", MIXES)
def test_mixed_batches(ops: Ops, mix: str, rows: int, dtype: torch.dtype) -> None:
    slots = adapters_of_rows(mix, rows, len(RANKS))
    segments, lora = segments_of(slots), lora_slots(RANKS, 64, 72, QKV, dtype)
    x, y = torch.randn(rows, 72), torch.randn(rows, sum(QKV))
    x[[slot is None for slot in slots]] = torch.nan
    shrunk = ops.lora_shrink(x, lora, segments)
    assert shrunk.shape == (len(segments.order), 3, 64)
    assert shrunk.dtype == torch.float32
    expected = expected_shrunk(x, lora, segments)
    assert_close(within_ranks(shrunk, lora, segments), expected.float(), LINEAR)
    before = y.clone()
    ops.lora_expand_(shrunk, lora, segments, y)
    assert_close(y, expected_sum(shrunk, lora, segments, before), LINEAR)
    alone = [slot is None or not any(RANKS[slot]) for slot in slots]
    assert torch.equal(y[alone], before[alone])


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 7, 133, 301])
@pytest.mark.parametrize("mix", MIXES)
def test_a_linear_with_adapters(ops: Ops, mix: str, rows: int, dtype: torch.dtype) -> None:
    """To the bit what the linear and both operations give one after the other."""
    slots = adapters_of_rows(mix, rows, len(RANKS))
    segments, lora = segments_of(slots), lora_slots(RANKS, 64, 72, QKV, dtype)
    x, weight = torch.randn(rows, 72), ops.pack_linear(torch.randn(sum(QKV), 72).to(dtype), torch.randn(sum(QKV)))
    assert torch.equal(ops.linear(x, weight, (lora, segments)), apply(ops, x, lora, segments, ops.linear(x, weight)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
def test_adapters_in_another_dtype_than_the_weight(ops: Ops, weight_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """To the bit what adapters of the same numbers in float32 add."""
    segments, narrow = segments_of(adapters_of_rows("zipf", 40, len(RANKS))), lora_slots(RANKS, 64, 72, QKV, dtype)
    wide = dataclasses.replace(narrow, a=narrow.a.float(), b=narrow.b.float())
    x, weight = torch.randn(40, 72), ops.pack_linear(torch.randn(sum(QKV), 72).to(weight_dtype))
    assert torch.equal(ops.linear(x, weight, (narrow, segments)), ops.linear(x, weight, (wide, segments)))


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("width", [1, 40, 64, 144, 208], ids=lambda width: f"width{width}")
@pytest.mark.parametrize("rows", [1, 3, 16, 133, 301])
def test_a_gated_linear_with_adapters(ops: Ops, rows: int, width: int, activation: Activation) -> None:
    """To the bit what its parts give one after the other: panels of gate and up meet within a task."""
    slots = adapters_of_rows("zipf", rows, len(RANKS))
    ranks = [of[:2] for of in RANKS]
    segments, lora = segments_of(slots), lora_slots(ranks, 64, 50, [width, width], torch.float32)
    x, weight = torch.randn(rows, 50), ops.pack_linear(torch.randn(2 * width, 50))
    product = ops.linear(x, weight)
    assert torch.equal(ops.linear(x, weight, activation=activation), ops.gated_activation(product, activation))
    with_adapters = ops.gated_activation(apply(ops, x, lora, segments, product), activation)
    assert torch.equal(ops.linear(x, weight, (lora, segments), activation), with_adapters)


@pytest.mark.parametrize(("size", "out"), [(1, 1), (5, 3), (31, 257), (576, 33), (1537, 8), (40, 100)], ids=str)
@pytest.mark.parametrize("rank", [1, 4, 6, 256])
def test_any_width_and_rank(ops: Ops, size: int, out: int, rank: int) -> None:
    segments, lora = (
        segments_of([0, None, 1, 0, 0, 1, 0]),
        lora_slots([[rank], [rank]], rank, size, [out], torch.float32),
    )
    x, y = torch.randn(7, size), torch.randn(7, out)
    shrunk = ops.lora_shrink(x, lora, segments)
    assert_close(shrunk, expected_shrunk(x, lora, segments).float(), LINEAR)
    assert_close(apply(ops, x, lora, segments, y), expected_sum(shrunk, lora, segments, y), LINEAR)


def test_rows_may_be_strided_and_matrices_spaced(ops: Ops) -> None:
    segments, lora = segments_of([1, 0, 1, 1, None, 0]), lora_slots(RANKS, 80, 24, QKV, torch.float32)
    spaced_a, spaced_b = torch.full((7, 3, 80, 31), torch.nan), torch.full((7, 80, 150), torch.nan)
    spaced_a[..., 3:27], spaced_b[..., 5:109] = lora.a, lora.b
    lora = dataclasses.replace(lora, a=spaced_a[..., 3:27], b=spaced_b[..., 5:109])
    x, wide_y = torch.randn(6, 2, 24)[:, 1], torch.randn(6, 3, 104)
    y = wide_y[:, 1]
    before = wide_y.clone()
    shrunk = ops.lora_shrink(x, lora, segments)
    ops.lora_expand_(shrunk, lora, segments, y)
    assert_close(y, expected_sum(expected_shrunk(x, lora, segments), lora, segments, before[:, 1]), LINEAR)
    assert torch.equal(wide_y[:, ::2], before[:, ::2])


def test_a_row_of_nan_stays_alone(ops: Ops) -> None:
    segments, lora = segments_of([0] * 8), lora_slots([[5]], 5, 16, [33], torch.float32)
    x = torch.randn(8, 16)
    x[3, 5] = torch.nan
    y = apply(ops, x, lora, segments, torch.zeros(8, 33))
    assert y.isnan().all(1).tolist() == [row == 3 for row in range(8)]
    assert y.isnan().any(1).tolist() == [row == 3 for row in range(8)]


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [2, 3, 5, 16, 150])
def test_a_row_has_the_same_bits_in_any_batch(native: CpuOps, rows: int, dtype: torch.dtype) -> None:
    lora = lora_slots(RANKS, 64, 1000, QKV, dtype)
    x, y = torch.randn(rows, 1000), torch.randn(rows, sum(QKV))
    for mix in MIXES:
        slots = adapters_of_rows(mix, rows, len(RANKS))
        together = apply(native, x, lora, segments_of(slots), y)
        for row in range(min(rows, 20)):
            alone = apply(native, x[row, None], lora, segments_of([slots[row]]), y[row, None])
            assert torch.equal(together[row], alone[0])


def lora_and_segments() -> tuple[LoraSlots, AdapterSegments]:
    return lora_slots([[4, 2], [3, 4]], 4, 8, [6, 10], torch.float32), segments_of([0, 1, None, 1])


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"slots": torch.tensor([0, 2], dtype=torch.int32)}, IndexError, "slot 2, there are 2"),
        ({"slots": torch.tensor([-1, 0], dtype=torch.int32)}, IndexError, "slot -1, there are 2"),
        ({"slots": torch.tensor([0, 1])}, ValueError, "slots int32"),
        ({"order": torch.tensor([0, 1, 4])}, IndexError, "row 4, the step has 4"),
        ({"order": torch.tensor([0, -1, 3])}, IndexError, "row -1, the step has 4"),
        ({"order": torch.tensor([0, 1, 3]).int()}, ValueError, "order int64"),
        ({"order": torch.tensor([0, 3, 1])}, ValueError, "order must not descend within a segment"),
        ({"order": torch.tensor([0, 1])}, ValueError, "from 0 to the length of order"),
        ({"starts": torch.tensor([1, 2, 3]).int()}, ValueError, "from 0 to the length of order"),
        ({"starts": torch.tensor([0, 4, 3]).int()}, ValueError, "must not descend"),
        ({"starts": torch.tensor([0, 3]).int()}, ValueError, "one more than slots"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_segments_are_refused(
    native: CpuOps, changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    lora, segments = lora_and_segments()
    shrunk, y = native.lora_shrink(torch.randn(4, 8), lora, segments), torch.zeros(4, 16)
    wrong = dataclasses.replace(segments, **changed)
    with pytest.raises(error, match=message):
        native.lora_shrink(torch.randn(4, 8), lora, wrong)
    with pytest.raises(error, match=message):
        native.lora_expand_(shrunk, lora, wrong, y)
    with pytest.raises(error, match=message):
        native.linear(torch.randn(4, 8), native.pack_linear(torch.randn(16, 8)), (lora, wrong))
    assert not y.any()


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"ranks": torch.tensor([[4, 2], [3, 5]], dtype=torch.int32)}, IndexError, "rank 5, must be below 5"),
        ({"ranks": torch.tensor([[4, 2], [3, -1]], dtype=torch.int32)}, IndexError, "rank -1, must be below 5"),
        ({"ranks": torch.tensor([[4, 2]], dtype=torch.int32)}, ValueError, r"ranks must be \[slots, slices\]"),
        ({"ranks": torch.tensor([[4, 2], [3, 4]])}, ValueError, "ranks must be contiguous int32"),
        ({"out_starts": (0, 6)}, ValueError, "out_starts must ascend from 0"),
        ({"out_starts": (0, 17, 16)}, ValueError, "out_starts must ascend from 0"),
        ({"out_starts": (0, 4, 6, 16)}, ValueError, r"ranks must be \[slots, slices\]"),
        ({"out_starts": ()}, ValueError, "out_starts must ascend from 0"),
        ({"b": torch.zeros(2, 3, 16)}, IndexError, "rank 4, must be below 4"),
        ({"b": torch.zeros(3, 4, 16)}, ValueError, r"ranks must be \[slots, slices\]"),
        ({"b": torch.zeros(2, 5, 16)}, ValueError, "shrunk must be"),
        ({"b": torch.zeros(2, 4, 17)}, ValueError, "width"),
        ({"b": torch.zeros(2, 16, 4).mT}, ValueError, "dense along out"),
        ({"b": torch.zeros(2, 4, 16).double()}, TypeError, "dtype Double"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_slots_are_refused(native: CpuOps, changed: dict[str, Any], error: type[Exception], message: str) -> None:
    lora, segments = lora_and_segments()
    shrunk, y = native.lora_shrink(torch.randn(4, 8), lora, segments), torch.zeros(4, 16)
    with pytest.raises(error, match=message):
        native.lora_expand_(shrunk, dataclasses.replace(lora, **changed), segments, y)
    assert not y.any()


@pytest.mark.parametrize(
    "changed", [{"b": torch.zeros(3, 4, 16)}, {"b": torch.zeros(2, 5, 16)}, {"out_starts": (0, 16)}]
)
def test_matrices_that_do_not_match_are_refused(native: CpuOps, changed: dict[str, Any]) -> None:
    lora, segments = lora_and_segments()
    weight = native.pack_linear(torch.randn(16, 8))
    with pytest.raises(ValueError, match="a and b must have the same slots, slices and max rank"):
        native.linear(torch.randn(4, 8), weight, (dataclasses.replace(lora, **changed), segments))


@pytest.mark.parametrize("shape", [(15, 8), (17, 8), (16, 7)])
def test_a_weight_of_another_shape_is_refused(native: CpuOps, shape: tuple[int, int]) -> None:
    lora, segments = lora_and_segments()
    with pytest.raises(ValueError, match="a and b must have the weight's shape"):
        native.linear(torch.randn(4, shape[1]), native.pack_linear(torch.randn(shape)), (lora, segments))


def test_wrong_inputs_are_refused(native: CpuOps) -> None:
    lora, segments = lora_and_segments()
    with pytest.raises(ValueError, match="of the weight's width"):
        native.lora_shrink(torch.randn(4, 9), lora, segments)
    with pytest.raises(ValueError, match="float32"):
        native.lora_shrink(torch.randn(4, 8).bfloat16(), lora, segments)
    with pytest.raises(ValueError, match="dense along in"):
        native.lora_shrink(torch.randn(4, 8), dataclasses.replace(lora, a=lora.a.mT.contiguous().mT), segments)
    for shrunk in (torch.zeros(2, 2, 4), torch.zeros(3, 1, 4), torch.zeros(3, 2, 5), torch.zeros(3, 2, 4).double()):
        y = torch.zeros(4, 16)
        with pytest.raises(ValueError, match="shrunk must be contiguous float32"):
            native.lora_expand_(shrunk, lora, segments, y)
        assert not y.any()

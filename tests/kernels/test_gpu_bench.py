"""`python -m tests.bench.gpu` at tiny shapes on a CPU, so that on a GPU nothing but the kernels is run first."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import triton_interpreter
from gpu.attention_cases import attention_specs
from gpu.cases import Case, Rig, Scale, Spec
from gpu.engine_phase import ENGINE, measure_engine
from gpu.kernel_phases import check_kernels, share_of_tolerance, time_kernels
from gpu.lora_cases import lora_specs
from gpu.random_model import Twins, random_twins
from gpu.report import Entry, Outcome, Report
from gpu.row_cases import row_specs
from gpu.step_phases import decode, prefill
from gpu.timing import Deadline
from roofline import H100, Cost, Shape
from torch import Tensor
from tree import ROOT

from mlserve.kernels.reference import ReferenceOps

SHAPE = Shape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, inner=96, vocabulary=320)
TINY = Scale(
    shape=SHAPE,
    rank=4,
    num_slots=5,
    batches=(1, 2, 4),
    contexts=(20, 40),
    step_context=24,
    max_context_tokens=100,
    chunks=((12, 12), (8, 20)),
    prefill_rows=6,
    adapters=(1, 2, 4),
    prompt=48,
    steps=2,
    block_size=4,
)
CPU = torch.device("cpu")


def some_of_lora(rig: Rig) -> Iterator[Spec]:
    """Three slices and one: in the interpreter all would take minutes."""
    return (spec for spec in lora_specs(rig) if spec.shape.startswith(("qkv, 2 rows", "down, 1 row")))


def some_rows(rig: Rig) -> Iterator[Spec]:
    return (spec for spec in row_specs(rig) if "2 rows" in spec.shape or spec.kernel.startswith("linear"))


FAMILIES: dict[str, Callable[[Rig], Iterator[Spec]]] = {
    "lora": some_of_lora,
    "attention": attention_specs,
    "rows": some_rows,
}


class Once:
    """A timer that runs work once and says that it took a millisecond."""

    def seconds(self, run: Callable[[], object], reset: Callable[[], object]) -> float:
        reset()
        run()
        return 1e-3


class Rerun:
    """A graph that is the captured function."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return work


def later() -> Deadline:
    return Deadline(600)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kernel_is_checked_and_timed(family: str) -> None:
    """In Triton's interpreter, beside what torch has."""
    triton_interpreter.install()
    torch.manual_seed(0)
    rig, report = Rig(CPU, torch.bfloat16, TINY), Report()
    check_kernels(FAMILIES[family](rig), report, later())
    assert [entry for entry in report.entries if entry.outcome is not Outcome.PASSED] == []
    checked = {entry.name for entry in report.entries}
    time_kernels(FAMILIES[family](rig), Once(), H100, report, later())
    timed = [entry for entry in report.entries if entry.outcome is Outcome.MEASURED]
    assert {entry.name for entry in timed} == checked
    assert [entry.note for entry in timed if entry.note] == []  # no peer raised
    assert all(entry.figures["µs"] == pytest.approx(1000) for entry in timed)
    assert all(0 < entry.figures["floor / time"] < 1 for entry in timed)


def spec(result: Callable[[], Tensor], expected: Tensor) -> Spec:
    case = Case(result, lambda: expected, Cost(8, 0), {"rtol": 0.0, "atol": 0.1})
    return Spec("kernel", "shape", lambda: case)


def outcomes(specs: list[Spec], deadline: Deadline) -> list[tuple[Outcome, str]]:
    report = Report()
    check_kernels(specs, report, deadline)
    return [(entry.outcome, entry.note) for entry in report.entries]


def test_checks_find_what_is_wrong() -> None:
    right = torch.ones(3)
    bits = iter([right, right + 1e-6])

    def raises() -> Tensor:
        raise RuntimeError("no such kernel\nand more")

    found = outcomes(
        [
            spec(lambda: right + 0.2, right),
            spec(lambda: right * torch.nan, right),
            spec(lambda: next(bits), right),
            spec(raises, right),
            spec(lambda: right[:2], right),
            spec(lambda: right + 0.05, right),
        ],
        later(),
    )
    assert [outcome for outcome, _ in found] == [Outcome.FAILED] * 5 + [Outcome.PASSED]
    assert [note.partition(" (")[0] for _, note in found] == [
        "beyond the tolerance",
        "beyond the tolerance, a second run gives other bits",  # NaN equals nothing
        "a second run gives other bits",
        "RuntimeError: no such kernel",
        "ValueError: the result is [2], the reference's [3]",
        "",
    ]


def test_what_there_is_no_time_for_is_skipped() -> None:
    clock = iter([0.0, 1.0, 2.0, 3.0])
    deadline = Deadline(1.5, lambda: next(clock))
    right = torch.ones(3)
    found = outcomes([spec(lambda: right, right) for _ in range(3)], deadline)
    assert [outcome for outcome, _ in found] == [Outcome.PASSED, Outcome.SKIPPED, Outcome.SKIPPED]


def test_share_of_tolerance() -> None:
    expected = torch.tensor([0.0, 10.0])
    assert share_of_tolerance(expected + 0.5, expected, rtol=0.1, atol=1.0) == pytest.approx(0.5)
    assert share_of_tolerance(expected, expected, rtol=0.0, atol=0.0) == 0
    assert share_of_tolerance(expected + 1e-3, expected, rtol=0.0, atol=0.0) == torch.inf


def test_a_peer_that_fails_is_no_failure() -> None:
    def peer() -> None:
        raise NotImplementedError("not for this shape")

    right, report = torch.ones(3), Report()
    case = Case(lambda: right, lambda: right, Cost(8, 0), {}, peers={"torch": peer})
    time_kernels([Spec("kernel", "shape", lambda: case)], Once(), None, report, later())
    assert report.entries[0].outcome is Outcome.MEASURED
    assert report.entries[0].note.startswith("torch: NotImplementedError: not for this shape")


@pytest.fixture(scope="module")
def rig() -> Rig:
    return Rig(CPU, torch.float32, TINY)


@pytest.fixture(scope="module")
def twins(rig: Rig) -> Twins:
    torch.manual_seed(0)
    return random_twins(rig, ReferenceOps(), Rerun(), 2**30)


def test_decode_steps(rig: Rig, twins: Twins) -> None:
    report = Report()
    decode(rig, twins, H100, report, later())
    assert [entry.case for entry in report.entries] == [
        *("batch 1, 0 adapters", "batch 1, 1 adapter"),
        *("batch 2, 0 adapters", "batch 2, 1 adapter", "batch 2, 2 adapters"),
        *("batch 4, 0 adapters", "batch 4, 1 adapter", "batch 4, 2 adapters", "batch 4, 4 adapters"),
    ]
    for entry in report.entries:
        assert entry.outcome is Outcome.PASSED, entry.note
        assert {"graph, ms", "eager, ms", "floor, ms", "floor / graph"} <= entry.figures.keys()


def test_a_graph_that_answers_otherwise_is_found(rig: Rig, twins: Twins) -> None:
    torch.manual_seed(1)
    other = random_twins(rig, ReferenceOps(), Rerun(), 2**30)
    report = Report()
    decode(rig, dataclasses.replace(twins, graphed=other.graphed), None, report, later())
    assert report.num_failed == len(report.entries)
    assert report.entries[0].note.startswith("row 0: token ")


def test_batches_without_room_are_skipped(rig: Rig) -> None:
    bytes_per_block = SHAPE.layers * 2 * SHAPE.kv_heads * SHAPE.head_dim * 4 * TINY.block_size
    needed = (2 * 7 + 1) * bytes_per_block  # two sequences of 7 blocks
    slots = 5 * 2 * 4 * (3 * 64 + 128 + 64 + 64 + 2 * 64 + 192 + 96 + 64) * 4 + 5 * 4 * 2 * (320 + 64) * 4
    free = (needed + slots + SHAPE.weight_bytes) / 0.9
    report, twins = Report(), random_twins(rig, ReferenceOps(), Rerun(), int(free))
    decode(rig, twins, None, report, later())
    skipped = [entry.case.partition(",")[0] for entry in report.entries if entry.outcome is Outcome.SKIPPED]
    assert {*skipped} == {"batch 4"}
    assert len(skipped) == 4
    prompts, scale = Report(), dataclasses.replace(TINY, chunks=((4, 4 * twins.num_blocks), (4, 4)))
    prefill(dataclasses.replace(rig, scale=scale), twins, None, prompts, later())
    assert [entry.outcome for entry in prompts.entries] == [Outcome.SKIPPED] * 2 + [Outcome.MEASURED] * 2


def test_prompts(rig: Rig, twins: Twins) -> None:
    report = Report()
    prefill(rig, twins, H100, report, later())
    assert [entry.outcome for entry in report.entries] == [Outcome.MEASURED] * 4, report.text()


def test_the_engine(rig: Rig, twins: Twins) -> None:
    report = Report()
    measure_engine(rig, twins, report, later())
    assert [(entry.phase, entry.outcome) for entry in report.entries] == [
        (ENGINE, Outcome.PASSED),
        (ENGINE, Outcome.MEASURED),
    ], report.text()


def test_a_report_as_text_and_as_json(tmp_path: Path) -> None:
    report = Report()
    report.add(Entry("phase", "kernel", "64 rows", Outcome.MEASURED, {"µs": 12.345, "GB/s": 2345.6}))
    report.add(Entry("phase", "other", "1 row", Outcome.FAILED, {"µs": 3.0}, "wrong"))
    assert report.text().splitlines() == [
        "== phase",
        "                   µs   GB/s",
        "kernel  64 rows  12.3  2,346  measured",
        "other   1 row       3         FAILED wrong",
        "",
        "0 passed, 1 FAILED, 1 measured, 0 skipped",
    ]
    report.write(tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())[1]["note"] == "wrong"
    assert report.num_failed == 1


def test_without_a_gpu_the_command_says_so() -> None:
    """From the repository's root, which then hides nothing."""
    if torch.cuda.is_available():
        pytest.skip("there is one")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    run = partial(subprocess.run, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120)
    result = run([sys.executable, "-m", "tests.bench.gpu"])
    assert result.returncode == 2, result.stderr
    assert result.stderr == "torch finds no CUDA device: run this on a machine with an NVIDIA GPU\n"
    assert result.stdout == ""

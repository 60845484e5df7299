"""`python -m tests.bench.gpu` as a whole, with what only a GPU has put in its place: all phases at tiny shapes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gpu import command, timing
from gpu.cases import FULL, Case, Rig, Scale, Spec
from gpu.report import Outcome
from gpu.timing import CudaTimer
from roofline import Cost, Shape

from mlserve.kernels.reference import ReferenceOps

SHAPE = Shape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, inner=96, vocabulary=320)
TINY = Scale(
    shape=SHAPE,
    rank=4,
    num_slots=3,
    batches=(1, 2),
    contexts=(20,),
    step_context=24,
    max_context_tokens=100,
    chunks=((12, 12),),
    prefill_rows=6,
    adapters=(1, 2),
    prompt=48,
    steps=2,
    block_size=4,
)


class FakeEvent:
    """Each is recorded some milliseconds after the last: 1, 2, 3 and so on."""

    order = count(1)

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.time = 0.0

    def record(self) -> None:
        step = next(FakeEvent.order)
        self.time = step * (step + 1) / 2

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.time - self.time


class Rerun:
    """A graph that is the captured function."""

    def __init__(self, device: torch.device) -> None: ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return work


@pytest.fixture
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that answers as a GPU does."""
    properties = SimpleNamespace(
        name="NVIDIA H200", total_memory=141e9, multi_processor_count=132, L2_cache_size=50e6, major=9, minor=0
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: properties.name)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**31))
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "FLUSHED_BYTES", 64)
    monkeypatch.setattr(FakeEvent, "order", count(1))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(command, "CudaGraphRecorder", Rerun)
    monkeypatch.setattr(command, "select", lambda device: ReferenceOps())
    monkeypatch.setattr(command, "Rig", lambda device, dtype, scale: Rig(torch.device("cpu"), torch.float32, TINY))


def specs(*results: float) -> Callable[[Rig], list[Spec]]:
    """Kernels with these results, where 1 is right."""

    def build(result: float) -> Spec:
        case = Case(lambda: torch.full((3,), result), lambda: torch.ones(3), Cost(8, 8), {"rtol": 0.0, "atol": 0.0})
        return Spec("kernel", f"giving {result}", lambda: case)

    return lambda rig: [build(result) for result in results]


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize(("results", "code"), [((1.0, 1.0), 0), ((2.0, 1.0), 1)])
def test_all_phases(
    results: tuple[float, ...],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "all_specs", specs(*results))
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path / "figures.json")])
    assert command.main() == code
    entries = json.loads((tmp_path / "figures.json").read_text())
    assert list(dict.fromkeys(entry["phase"] for entry in entries)) == [
        "device and versions",
        "kernels against the reference",
        "kernels against their floors and torch",
        "decoding, whole steps",
        "prompts, whole steps",
        "the engine",
    ]
    failed = [entry["case"] for entry in entries if entry["outcome"] == Outcome.FAILED]
    assert failed == ([] if code == 0 else ["giving 2.0"])
    assert len([entry for entry in entries if entry["name"] == "kernel"]) == 4  # the second in spite of the first
    assert "floors of NVIDIA H200 SXM" in capsys.readouterr().out


@pytest.mark.usefixtures("_gpu")
def test_nothing_is_begun_after_the_limit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "all_specs", specs(1.0))
    monkeypatch.setattr(sys, "argv", ["gpu", "--limit", "0"])
    assert command.main() == 0
    assert "0 passed, 0 FAILED, 6 measured, 11 skipped" in capsys.readouterr().out


@pytest.mark.usefixtures("_gpu")
def test_an_interpreter_is_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert command.main() == 2
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err


@pytest.mark.usefixtures("_gpu")
def test_a_median_of_runs_by_events() -> None:
    """Two warm runs, one that says how many more, then those; the events of measured run i are 2i ms apart."""
    calls: list[str] = []
    seconds = CudaTimer(torch.device("cpu")).seconds(lambda: calls.append("run"), lambda: calls.append("reset"))
    assert calls == ["reset", "run"] * (2 + 1 + timing.MAX_RUNS)
    assert seconds == pytest.approx(1e-3 * (4 + 62) / 2)  # runs 2 to 31


def test_all_kernels_at_full_scale_have_names_of_their_own() -> None:
    found = list(command.all_specs(Rig(torch.device("cpu"), torch.bfloat16, FULL)))
    assert len({(spec.kernel, spec.shape) for spec in found}) == len(found)
    assert {spec.kernel for spec in found if spec.is_checked} == {spec.kernel for spec in found if spec.is_timed}
    assert {*(1, 4, 16, 64)} <= {int(spec.shape.split(", ")[2].split()[0]) for spec in found if "lora" in spec.kernel}

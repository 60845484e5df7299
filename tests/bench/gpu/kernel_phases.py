"""Kernels one by one: each against the reference, then each against its floor and against torch."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterable

import torch
from gpu.cases import Case, Spec
from gpu.report import Entry, Outcome, Report
from gpu.timing import Deadline, Timer
from roofline import Device
from torch import Tensor

__all__ = ["CHECKS", "TIMES", "check_kernels", "reason", "time_kernels"]

CHECKS, TIMES = "kernels against the reference", "kernels against their floors and torch"


def check_kernels(specs: Iterable[Spec], report: Report, deadline: Deadline) -> None:
    """Each result within its tolerance, and a second run's the same to the bit."""
    for spec in specs:
        if not spec.is_checked:
            continue
        if deadline.is_over:
            report.add(_skipped(CHECKS, spec))
            continue
        try:
            with torch.inference_mode():
                report.add(_check(spec, spec.build()))
        except Exception as error:
            report.add(Entry(CHECKS, spec.kernel, spec.shape, Outcome.FAILED, note=reason(error)))
        gc.collect()


def _check(spec: Spec, case: Case) -> Entry:
    expected = case.expected()
    results = []
    for _ in range(2):
        case.reset()
        results.append(case.view(case.run()).clone())
    share = share_of_tolerance(results[0], expected, case.tolerance["rtol"], case.tolerance["atol"])
    notes = []
    if not share <= 1:  # NaN is not
        notes.append("beyond the tolerance")
    if not torch.equal(*results):
        notes.append("a second run gives other bits")
    outcome = Outcome.FAILED if notes else Outcome.PASSED
    return Entry(CHECKS, spec.kernel, spec.shape, outcome, {"error / tolerance": share}, ", ".join(notes))


def share_of_tolerance(result: Tensor, expected: Tensor, rtol: float, atol: float) -> float:
    """The largest error over what is allowed for that element; NaN if there is one, infinite for any error at 0."""
    if result.shape != expected.shape:
        raise ValueError(f"the result is {[*result.shape]}, the reference's {[*expected.shape]}")
    error = (result.double() - expected.double()).abs()
    shares = torch.where(error == 0, 0.0, error / (atol + rtol * expected.double().abs()))
    return float(shares.max()) if shares.numel() else 0.0


def time_kernels(specs: Iterable[Spec], timer: Timer, gpu: Device | None, report: Report, deadline: Deadline) -> None:
    """`gpu`: whose floors are known, or None."""
    for spec in specs:
        if not spec.is_timed:
            continue
        if deadline.is_over:
            report.add(_skipped(TIMES, spec))
            continue
        try:
            with torch.inference_mode():
                report.add(_time(spec, spec.build(), timer, gpu))
        except Exception as error:
            report.add(Entry(TIMES, spec.kernel, spec.shape, Outcome.FAILED, note=reason(error)))
        gc.collect()


def _time(spec: Spec, case: Case, timer: Timer, gpu: Device | None) -> Entry:
    seconds = timer.seconds(case.run, case.reset)
    figures = {"µs": seconds * 1e6}
    if gpu is not None:
        floor = case.cost.seconds(gpu)
        figures |= {"floor, µs": floor * 1e6, "floor / time": floor / seconds}
    figures |= {"GB/s": case.cost.bytes / seconds / 1e9, "TFLOPS": case.cost.flops / seconds / 1e12}
    notes = []
    for name, run in case.peers.items():
        try:
            peer = timer.seconds(run, case.reset)
        except Exception as error:  # a peer that can't do a shape is no failure of ours
            notes.append(f"{name}: {reason(error)}")
            continue
        figures |= {f"{name}, µs": peer * 1e6, f"{name} / ours": peer / seconds}
    return Entry(TIMES, spec.kernel, spec.shape, Outcome.MEASURED, figures, "; ".join(notes))


def _skipped(phase: str, spec: Spec) -> Entry:
    return Entry(phase, spec.kernel, spec.shape, Outcome.SKIPPED, note="no time left")


def reason(error: Exception) -> str:
    """The error in a line, with where it was raised."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text} ({where.filename.rpartition('/')[2]}:{where.lineno})"

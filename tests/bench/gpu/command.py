"""All phases, one after the other, within a limit of time."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from gpu.attention_cases import attention_specs
from gpu.cases import FULL, Rig, Spec
from gpu.device_phase import describe
from gpu.engine_phase import measure_engine
from gpu.kernel_phases import check_kernels, time_kernels
from gpu.lora_cases import lora_specs
from gpu.random_model import random_twins
from gpu.report import Report
from gpu.row_cases import row_specs
from gpu.step_phases import decode, prefill
from gpu.timing import CudaTimer, Deadline
from roofline import device_named

from mlserve.kernels.dispatch import select
from mlserve.model.graphs import CudaGraphRecorder

__all__ = ["main"]

LIMIT = 460.0  # seconds in all
# When each phase ends at the latest, as a share of the limit. What one leaves is the next one's.
ENDS = {"checks": 0.4, "times": 0.65, "decode": 0.88, "prefill": 0.94, "engine": 1.0}


def main() -> int:
    """The exit code: 0, or 1 if a check failed, or 2 if there is nothing to run on."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, help="a JSON file for all figures")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds in all; what is left then is skipped")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch finds no CUDA device: run this on a machine with an NVIDIA GPU", file=sys.stderr)
        return 2
    if os.environ.get("TRITON_INTERPRET"):
        print("TRITON_INTERPRET is set, so kernels wouldn't be compiled: unset it", file=sys.stderr)
        return 2
    report = Report()
    begin = time.monotonic()
    try:
        run(Rig(torch.device("cuda"), torch.bfloat16, FULL), report, options.limit)
    finally:  # what was measured before it was interrupted
        print(report.text())
        print(f"{time.monotonic() - begin:.0f} s")
        if options.out is not None:
            report.write(options.out)
    return 1 if report.num_failed else 0


def run(rig: Rig, report: Report, limit: float) -> None:
    """Everything, on a GPU."""
    torch.manual_seed(0)
    ends = {phase: Deadline(limit * share) for phase, share in ENDS.items()}
    gpu = device_named(torch.cuda.get_device_name(rig.device))
    describe(rig.device, gpu, report)
    _say("checking kernels")
    check_kernels(all_specs(rig), report, ends["checks"])
    _say("timing kernels")
    time_kernels(all_specs(rig), CudaTimer(rig.device), gpu, report, ends["times"])
    gc.collect()
    torch.cuda.empty_cache()
    _say("making a model")
    free = torch.cuda.mem_get_info(rig.device)[0]
    twins = random_twins(rig, select(rig.device), CudaGraphRecorder(rig.device), free)
    _say("timing decode steps")
    decode(rig, twins, gpu, report, ends["decode"])
    _say("timing prompts")
    prefill(rig, twins, gpu, report, ends["prefill"])
    _say("timing the engine")
    measure_engine(rig, twins, report, ends["engine"])


def all_specs(rig: Rig) -> Iterator[Spec]:
    """Adapters and attention first: if time runs out, it does so on what is simple."""
    yield from lora_specs(rig)
    yield from attention_specs(rig)
    yield from row_specs(rig)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

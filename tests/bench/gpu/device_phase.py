"""On what, and with what."""

from __future__ import annotations

import platform

import torch
import triton
from gpu.report import Entry, Outcome, Report
from roofline import Device

import mlserve

__all__ = ["DEVICE", "describe"]

DEVICE = "device and versions"


def describe(device: torch.device, gpu: Device | None, report: Report) -> None:
    """`gpu`: whose floors are known."""
    properties = torch.cuda.get_device_properties(device)
    figures = {
        "memory, GB": properties.total_memory / 1e9,
        "free, GB": torch.cuda.mem_get_info(device)[0] / 1e9,
        "multiprocessors": properties.multi_processor_count,
        "L2, MB": properties.L2_cache_size / 1e6,
    }
    floors = f"floors of {gpu.sheet}" if gpu is not None else "no floors: the device isn't in tests/bench/roofline.py"
    capability = f"{properties.major}.{properties.minor}"
    report.add(Entry(DEVICE, properties.name, f"capability {capability}", Outcome.MEASURED, figures, floors))
    for name, version in versions().items():
        report.add(Entry(DEVICE, name, version, Outcome.MEASURED))


def versions() -> dict[str, str]:
    return {
        "mlserve": mlserve.__version__,
        "torch": torch.__version__,
        "CUDA of torch": str(torch.version.cuda),
        "triton": triton.__version__,
        "Python": platform.python_version(),
    }

"""What kernels need to know about a GPU."""

from __future__ import annotations

from functools import cache

import torch

__all__ = ["AMPERE", "HOPPER", "Capability", "compute_capability"]

Capability = tuple[int, int]  # CUDA's compute capability: major, minor

AMPERE: Capability = (8, 0)
HOPPER: Capability = (9, 0)


@cache
def compute_capability(device: torch.device) -> Capability:
    """A CPU, on which kernels are interpreted, can do what a Hopper can."""
    return HOPPER if device.type == "cpu" else torch.cuda.get_device_capability(device)

"""Which implementation serves a device. Asked once, when a model is loaded."""

from __future__ import annotations

import torch

from mlserve.errors import ConfigError
from mlserve.kernels import Ops
from mlserve.kernels.reference import ReferenceOps

__all__ = ["select"]


def select(device: torch.device, kernels: str = "auto") -> Ops:
    """The operations for `device`."""
    if kernels not in ("auto", "reference"):
        raise ConfigError(f"kernels is {kernels!r}: use one of auto, reference")
    return ReferenceOps()

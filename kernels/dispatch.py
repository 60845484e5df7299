"""Which implementation serves a device. Asked once, when a model is loaded."""

from __future__ import annotations

import importlib.util
import logging
from enum import StrEnum

import torch

from mlserve.errors import ConfigError, KernelBuildError
from mlserve.kernels import Ops
from mlserve.kernels.reference import ReferenceOps

__all__ = ["Kernels", "select"]

logger = logging.getLogger(__name__)


class Kernels(StrEnum):
    """What a user may ask for."""

    AUTO = "auto"  # the fastest that works on the device
    CPU = "cpu"  # native CPU operations, or an error
    TRITON = "triton"  # Triton kernels, for CUDA devices
    REFERENCE = "reference"  # plain torch


def select(device: torch.device, kernels: str = "auto") -> Ops:
    """The operations for `device`.

    Raises ConfigError if `kernels` isn't a member of `Kernels` or doesn't fit the device, or if Triton is needed and
    isn't installed, and KernelBuildError if it is "cpu" and the native operations can't be built. With "auto" a failed
    build is logged and plain torch takes over.
    """
    if kernels not in list(Kernels):
        raise ConfigError(f"kernels is {kernels!r}: use one of {', '.join(Kernels)}")
    on_cpu = device.type == "cpu"
    match Kernels(kernels):
        case Kernels.CPU if not on_cpu:
            raise ConfigError(f"kernels is 'cpu' and the device {device}: use kernels='auto' or device='cpu'")
        case Kernels.CPU:
            return _native_cpu()
        case Kernels.AUTO if on_cpu:
            try:
                return _native_cpu()
            except KernelBuildError as error:
                logger.warning("%s. Falling back to plain torch, which is some 3 times slower", error)
        case Kernels.TRITON:
            return _triton(device)
        case Kernels.AUTO if device.type == "cuda":
            return _triton(device)
    return ReferenceOps()


def _native_cpu() -> Ops:
    from mlserve.kernels.cpu.ops import CpuOps

    return CpuOps()


def _triton(device: torch.device) -> Ops:
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("Triton kernels need the package triton: install it, or use kernels='reference'")
    import triton

    # Triton's interpreter, which tests use, takes tensors of any device.
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise ConfigError(f"kernels is 'triton' and the device {device}: use kernels='auto' or device='cuda'")
    from mlserve.kernels.triton.ops import TritonOps

    return TritonOps()

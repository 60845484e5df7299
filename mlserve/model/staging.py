"""How a step's numbers travel between host and device: its inputs in one copy, its results with one wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Event", "InPlace", "Staged", "Uploads", "fetch", "place", "uploads_for"]

_ALIGNMENT = 16  # bytes, so that every dtype's elements are where kernels may load them
_FIRST_CAPACITY = 2**18  # bytes: 256 decoding sequences of 3,000 tokens


class Uploads(Protocol):
    """Brings arrays to a device. A step puts all that it needs, and sends it at once."""

    def put(self, array: NDArray[Any]) -> Tensor:
        """The array on the device: to be read by what is begun after `send`, and until the next step's."""
        ...

    def send(self) -> None:
        """Copy all that was put since the last time."""
        ...


class InPlace:
    """For a CPU: the arrays themselves, without a copy."""

    def put(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array)

    def send(self) -> None:
        pass


class Event(Protocol):
    """A point in the order of what the device does; `torch.cuda.Event` is one."""

    def record(self) -> None:
        """It is after all that was begun so far."""
        ...

    def synchronize(self) -> None:
        """Wait for it, unless it was never recorded."""
        ...


class _Now:
    """The event of a CPU, where a copy is done when its call returns."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _HostBuffer:
    memory: Tensor  # [capacity] uint8, page-locked if a GPU reads it
    copied: Event  # when it may be written again


class Staged:
    """For a GPU: arrays are laid out one after the other in page-locked memory, and go to the device in one copy.

    Two host buffers in turn: one step's inputs are laid out while the last one's may still be on their way. One device
    buffer is enough, since copies and steps are in order there. Equal sizes put in the same order get equal addresses.
    """

    def __init__(
        self,
        device: torch.device,
        capacity: int = _FIRST_CAPACITY,
        *,
        may_grow: bool = True,
        make_event: Callable[[], Event] | None = None,
    ) -> None:
        """capacity: bytes. With `may_grow` false a step that needs more raises `RuntimeError`: addresses never change.

        make_event: by default CUDA's, or none on a CPU, where tests run this.
        """
        self._device = device
        self._may_grow = may_grow
        self._used = 0  # bytes of the buffer in turn
        self._turn = 0
        self._make_event: Callable[[], Event] = make_event or (torch.cuda.Event if device.type == "cuda" else _Now)
        self._allocate(capacity)

    def put(self, array: NDArray[Any]) -> Tensor:
        start = self._used
        end = start + array.nbytes
        if end > len(self._on_device):
            self._grow(array.nbytes)
            start, end = 0, array.nbytes
        self._host[start:end].view(array.dtype).reshape(array.shape)[...] = array
        self._used = -(-end // _ALIGNMENT) * _ALIGNMENT
        dtype = torch.from_numpy(array[:0]).dtype
        return self._on_device[start:end].view(dtype).view(array.shape)

    def send(self) -> None:
        buffer, size = self._buffers[self._turn], min(self._used, len(self._on_device))
        self._on_device[:size].copy_(buffer.memory[:size], non_blocking=True)
        buffer.copied.record()
        self._turn = 1 - self._turn
        self._open()

    def _open(self) -> None:
        """Begin with the buffer whose turn it is."""
        buffer = self._buffers[self._turn]
        buffer.copied.synchronize()
        self._host: NDArray[np.uint8] = buffer.memory.numpy()
        self._used = 0

    def _grow(self, num_bytes: int) -> None:
        """Take larger buffers. What was put before stays where it is: its tensors hold the old ones."""
        capacity = len(self._on_device)
        if not self._may_grow:
            raise RuntimeError(f"a step's inputs need more than the {capacity} bytes that a graph was captured with")
        self.send()
        self._allocate(2 * max(capacity, num_bytes))

    def _allocate(self, capacity: int) -> None:
        on_gpu = self._device.type == "cuda"
        self._on_device = torch.zeros(capacity, dtype=torch.uint8, device=self._device)
        self._buffers = [
            _HostBuffer(torch.zeros(capacity, dtype=torch.uint8, pin_memory=on_gpu), self._make_event())
            for _ in range(2)
        ]
        self._turn = 0
        self._open()


def uploads_for(device: torch.device) -> Uploads:
    """Those that suit a device."""
    return InPlace() if device.type == "cpu" else Staged(device)


def place(array: NDArray[Any], device: torch.device) -> Tensor:
    """One array on a device, without waiting for what that is at. On a CPU it is the array itself."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def fetch(*tensors: Tensor) -> list[NDArray[Any]]:
    """The tensors in host memory: those of one GPU are copied there together, and waited for once."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return [tensor.numpy() for tensor in tensors]
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]  # into page-locked memory
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(tensors[0].device))
    copied.synchronize()
    return [copy.numpy() for copy in copies]

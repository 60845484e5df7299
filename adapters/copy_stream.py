"""When adapters are copied into their slots: beside the steps that compute, where the device can do both at once."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

__all__ = ["InOrder", "SideStream", "SlotCopies", "slot_copies"]


class SlotCopies(Protocol):
    """Orders the copies into slots and the steps that read them."""

    def writing(self, slot: int) -> AbstractContextManager[None]:
        """Copies inside overwrite the slot once no step that was begun can read it any more."""
        ...

    def before_use(self, slots: Set[int]) -> None:
        """What is computed from here on sees all that was written into these slots."""
        ...


class InOrder:
    """On a CPU: a copy is done when its call returns, and so is a step."""

    def writing(self, slot: int) -> AbstractContextManager[None]:
        return nullcontext()

    def before_use(self, slots: Set[int]) -> None:
        pass


class SideStream:
    """On a GPU: copies run on a stream of their own, and only steps that use a slot wait for its copy.

    Memory that both streams use lives as long as the slots, or belongs to one stream alone.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied: dict[int, torch.cuda.Event] = {}  # by slots that no step has waited for yet

    @contextmanager
    def writing(self, slot: int) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
        self._copied[slot] = self._stream.record_event()

    def before_use(self, slots: Set[int]) -> None:
        for slot in slots & self._copied.keys():
            torch.cuda.current_stream(self._device).wait_event(self._copied.pop(slot))


def slot_copies(device: torch.device) -> SlotCopies:
    """Those that suit a device."""
    return SideStream(device) if device.type == "cuda" else InOrder()

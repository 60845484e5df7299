from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from planned import Driver, Planned, random_adapter

from mlserve.adapters.copy_stream import InOrder, SideStream, slot_copies
from mlserve.adapters.slots import AdapterSlots
from mlserve.adapters.spec import Module
from mlserve.config import ModelOptions
from mlserve.model.base_weights import base_shape
from mlserve.model.loader import load_model
from mlserve.model.plan import SlotLoad
from mlserve.model.runner import ModelRunner

CPU = torch.device("cpu")


class Noted(InOrder):
    """Notes when slots are written and when steps ask for them."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, frozenset[int]]] = []

    @contextmanager
    def writing(self, slot: int) -> Iterator[None]:
        self.calls.append(("begin", frozenset({slot})))
        yield
        self.calls.append(("end", frozenset({slot})))

    def before_use(self, slots: Set[int]) -> None:
        call = ("use", frozenset(slots))
        if self.calls[-1] != call:  # a prompt's step asks twice: for all rows, and for those whose logits are wanted
            self.calls.append(call)


def test_the_copies_that_suit_a_cpu() -> None:
    assert isinstance(slot_copies(CPU), InOrder)


def test_steps_ask_for_the_slots_that_they_use_and_no_others(tiny_model_dir: Path) -> None:
    """An adapter may be written while steps of others run; the first step that uses it waits for it."""
    decoder = load_model(ModelOptions(str(tiny_model_dir), device="cpu")).decoder
    base, noted = base_shape(decoder.config), Noted()
    slots = AdapterSlots(base, 3, 4, torch.float32, CPU, noted)
    driver = Driver(ModelRunner(decoder, 20, 4, torch.float32, slots))
    adapters = [random_adapter(base, seed, modules=[Module.Q_PROJ]) for seed in range(3)]
    first, second, plain = Planned([1, 2], adapter_slot=0), Planned([3, 4], adapter_slot=1), Planned([5, 6])
    driver.step([(first, 2)], [SlotLoad(0, adapters[0])])
    driver.step([(plain, 2)], [SlotLoad(1, adapters[1])])
    driver.step([(first, 1), (plain, 1)])
    driver.step([(first, 1), (second, 2)])
    assert noted.calls == [
        ("begin", {0}),
        ("end", {0}),
        ("use", {0}),
        ("begin", {1}),
        ("end", {1}),
        ("use", {0}),
        ("use", {0, 1}),
    ]


@pytest.mark.gpu
def test_a_slot_is_not_overwritten_while_a_step_reads_it() -> None:
    device = torch.device("cuda")
    copies, slot = SideStream(device), torch.zeros(2**20, device=device)
    source = torch.ones(2**20).pin_memory()
    torch.cuda.synchronize()
    for value in range(1, 20):
        torch.cuda._sleep(2_000_000)  # a step that is slow to begin
        read = slot.clone()
        with copies.writing(0):
            slot.copy_(source * value, non_blocking=False)
        copies.before_use({0})
        after = slot.clone()
        assert read.unique().tolist() == [value - 1]
        assert after.unique().tolist() == [value]


@pytest.mark.gpu
def test_a_load_doesn_t_hold_up_steps_that_don_t_use_it() -> None:
    device = torch.device("cuda")
    copies, done = SideStream(device), torch.cuda.Event()
    with copies.writing(1):
        torch.cuda._sleep(2_000_000_000)  # a copy of a second
    copies.before_use({0})
    torch.ones(8, device=device).sum()
    done.record()
    done.synchronize()
    assert not copies._stream.query(), "the step waited for a slot that it doesn't use"
    copies.before_use({1})
    torch.cuda.current_stream().synchronize()
    assert copies._stream.query()

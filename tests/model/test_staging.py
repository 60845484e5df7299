"""On a CPU the staging of a GPU's inputs copies between two pieces of host memory; events are counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mlserve.model.staging import InPlace, Staged, fetch

CPU = torch.device("cpu")


class Log:
    """Events that note what is done with them, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.num_events = 0

    def make(self) -> _Event:
        self.num_events += 1
        return _Event(self, self.num_events)


class _Event:
    def __init__(self, log: Log, number: int) -> None:
        self.log = log
        self.number = number

    def record(self) -> None:
        self.log.calls.append(("record", self.number))

    def synchronize(self) -> None:
        self.log.calls.append(("wait", self.number))


ARRAYS = [
    np.arange(5, dtype=np.int64),
    np.arange(7, dtype=np.int32),
    np.arange(6, dtype=np.int64).reshape(3, 2),
    np.zeros(0, dtype=np.int64),
    np.arange(3, dtype=np.int32),
]


def test_in_place_is_no_copy() -> None:
    array = np.arange(4)
    tensor = InPlace().put(array)
    array[2] = 9
    assert tensor.tolist() == [0, 1, 9, 3]


def test_arrays_arrive_with_their_shapes_and_types() -> None:
    staged = Staged(CPU, 1024)
    tensors = [staged.put(array) for array in ARRAYS]
    assert not any(tensor.any() for tensor in tensors)  # nothing was sent
    staged.send()
    for tensor, array in zip(tensors, ARRAYS, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array))
        assert tensor.data_ptr() % 16 == 0 or not tensor.numel()


def test_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    copy = torch.Tensor.copy_

    def counted(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        copies.append((len(source), non_blocking))
        return copy(self, source, non_blocking)

    staged = Staged(CPU, 1024)
    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    for array in ARRAYS:
        staged.put(array)
    staged.send()
    assert copies == [(48 + 32 + 48 + 0 + 16, True)]  # what was put, and not the whole buffer


def test_equal_sizes_have_equal_addresses() -> None:
    staged = Staged(CPU, 1024)
    addresses = []
    for step in range(3):
        tensors = [staged.put(array + step) for array in ARRAYS]
        staged.send()
        addresses.append([tensor.data_ptr() for tensor in tensors])
        assert torch.equal(tensors[0], torch.from_numpy(ARRAYS[0] + step))
    assert addresses[0] == addresses[1] == addresses[2]


def test_a_buffer_is_written_again_only_when_its_copy_is_done() -> None:
    log = Log()
    staged = Staged(CPU, 256, make_event=log.make)
    for _ in range(3):
        staged.put(ARRAYS[0])
        staged.send()
    # 1 and 2 in turn: a copy from 1 is recorded, then 2 is waited for before it is written, and so on.
    assert log.calls == [
        ("wait", 1),
        ("record", 1),
        ("wait", 2),
        ("record", 2),
        ("wait", 1),
        ("record", 1),
        ("wait", 2),
    ]


def test_host_buffers_are_two() -> None:
    """While the copy of one step is under way, the next is laid out elsewhere."""
    staged = Staged(CPU, 256)
    staged.put(np.array([1]))
    first = staged._host
    staged.send()
    staged.put(np.array([2]))
    assert not np.shares_memory(first, staged._host)
    assert first[:8].view(np.int64)[0] == 1


def test_buffers_grow_in_the_middle_of_a_step() -> None:
    staged = Staged(CPU, 64)
    arrays = [np.arange(size, dtype=np.int64) for size in (4, 30, 2, 100)]
    tensors = [staged.put(array) for array in arrays]
    staged.send()
    for tensor, array in zip(tensors, arrays, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array))


def test_a_graph_s_inputs_never_move() -> None:
    staged = Staged(CPU, 64, may_grow=False)
    staged.put(np.arange(8))
    with pytest.raises(RuntimeError, match="more than the 64 bytes"):
        staged.put(np.arange(1))


def test_fetch_on_a_cpu() -> None:
    tensor = torch.arange(3)
    (array,) = fetch(tensor)
    assert np.shares_memory(array, tensor.numpy())


@pytest.mark.gpu
def test_staged_on_a_gpu() -> None:
    """Many steps in a row without a wait of ours: each one's copy brings its own numbers."""
    device = torch.device("cuda")
    staged = Staged(device, 1024)
    assert all(buffer.memory.is_pinned() for buffer in staged._buffers)
    kept = []
    for step in range(50):
        tensors = [staged.put(array + step) for array in ARRAYS]
        staged.send()
        kept.append([tensor.clone() for tensor in tensors])
        torch.cuda._sleep(100_000)  # the device falls behind
    for step, tensors in enumerate(kept):
        for tensor, array in zip(fetch(*tensors), ARRAYS, strict=True):
            assert np.array_equal(tensor, array + step)

"""Headers of safetensors files that contradict the file or themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import safetensors_bytes
from safetensors.torch import save_file

from mlserve.adapters.safetensors_file import MAX_HEADER_BYTES, SafetensorsFile
from mlserve.adapters.tensor_file import TensorInfo
from mlserve.errors import CorruptAdapterError


def entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def infos_of(path: Path, content: bytes) -> dict[str, TensorInfo]:
    path.write_bytes(content)
    with path.open("rb") as file:
        return dict(SafetensorsFile(file).infos)


def test_what_the_package_writes_is_read(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 4),
        "b": torch.randn(5).bfloat16(),
        "c": torch.randn(2, 2, 2).half(),
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
    }
    save_file(tensors, tmp_path / "x", metadata={"format": "pt"})
    with (tmp_path / "x").open("rb") as file:
        weights = SafetensorsFile(file)
        assert weights.infos.keys() == tensors.keys()
        for name, tensor in tensors.items():
            read = weights.read(name)
            assert read.dtype == tensor.dtype
            assert torch.equal(read, tensor)
        assert weights.infos["b"] == TensorInfo((5,), "BF16", 10)


def test_tensors_need_not_be_aligned(tmp_path: Path) -> None:
    value = torch.tensor([1.5, -2.5])
    header = {"pad": entry([1], 0, 1, "U8"), "x": entry([2], 1, 9)}
    (tmp_path / "x").write_bytes(safetensors_bytes(header, b"\0" + value.numpy().tobytes()))
    with (tmp_path / "x").open("rb") as file:
        assert torch.equal(SafetensorsFile(file).read("x"), value)


def test_unknown_dtypes_are_listed(tmp_path: Path) -> None:
    assert infos_of(tmp_path / "x", safetensors_bytes({"x": entry([3], 0, 2, "F4")}, bytes(2))) == {
        "x": TensorInfo((3,), "F4", 2)
    }


DAMAGED: dict[str, bytes] = {
    "empty": b"",
    "short": b"\x01\0\0",
    "length-only": bytes(8),
    "header-longer-than-file": (100).to_bytes(8, "little") + b"{}",
    "header-of-exabytes": b"\xff" * 8 + b"{}",
    "header-over-the-limit": safetensors_bytes(b"{" + b" " * MAX_HEADER_BYTES + b"}"),
    "not-json": safetensors_bytes(b"{'a': 1}"),
    "not-utf8": safetensors_bytes(b'{"\xff": 1}'),
    "deep": safetensors_bytes(b"[" * 100_000),
    "list": safetensors_bytes(b"[]"),
    "twice": safetensors_bytes(b'{"x": 1, "x": 1}'),
    "twice-inside": safetensors_bytes(
        b'{"x": {"dtype": "F32", "shape": [], "shape": [1], "data_offsets": [0, 4]}}', bytes(4)
    ),
    "entry-is-none": safetensors_bytes({"x": None}),
    "no-dtype": safetensors_bytes({"x": {"shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
    "dtype-is-a-number": safetensors_bytes({"x": {"dtype": 3, "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
    "shape-is-text": safetensors_bytes({"x": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}}, bytes(4)),
    "negative-shape": safetensors_bytes({"x": entry([-1, -1], 0, 4)}, bytes(4)),
    "fractional-shape": safetensors_bytes({"x": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, bytes(4)),
    "boolean-shape": safetensors_bytes({"x": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, bytes(4)),
    "many-dimensions": safetensors_bytes({"x": entry([1] * 9, 0, 4)}, bytes(4)),
    "huge-shape": safetensors_bytes({"x": entry([2**62, 2**62], 0, 4)}, bytes(4)),
    "shape-too-large": safetensors_bytes({"x": entry([2], 0, 4)}, bytes(4)),
    "backwards": safetensors_bytes({"x": entry([1], 0, 4), "y": entry([3], 4, 0, "F4")}),
    "overlap": safetensors_bytes({"x": entry([2], 0, 8), "y": entry([2], 4, 12)}, bytes(12)),
    "same-place": safetensors_bytes({"x": entry([1], 0, 4), "y": entry([1], 0, 4)}, bytes(4)),
    "hole": safetensors_bytes({"x": entry([1], 0, 4), "y": entry([1], 8, 12)}, bytes(12)),
    "starts-late": safetensors_bytes({"x": entry([1], 4, 8)}, bytes(8)),
    "beyond-the-end": safetensors_bytes({"x": entry([2], 0, 8)}, bytes(7)),
    "cut-by-terabytes": safetensors_bytes({"x": entry([2**38], 0, 2**40)}, bytes(8)),
    "more-data": safetensors_bytes({"x": entry([1], 0, 4)}, bytes(5)),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged_files(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(CorruptAdapterError):
        infos_of(tmp_path / "x", content)


def test_file_that_is_cut_after_it_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(safetensors_bytes({"x": entry([100_000], 0, 400_000)}, bytes(400_000)))
    with path.open("r+b") as other, path.open("rb") as file:
        weights = SafetensorsFile(file)
        other.truncate(200_000)
        with pytest.raises(CorruptAdapterError, match="cut short while x was read"):
            weights.read("x")

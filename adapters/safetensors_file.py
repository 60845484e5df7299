"""Reads safetensors files that nobody vouches for.

The safetensors package maps the file into memory, so a file that is cut short or rewritten while it is read ends the
process (SIGBUS) or changes tensors later. Here every byte is read once, through one open file, after the header was
checked against the file's size. Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from io import BufferedReader
from typing import Any

import torch
from torch import Tensor

from mlserve.adapters.tensor_file import DTYPES, TensorInfo
from mlserve.errors import CorruptAdapterError

__all__ = ["SafetensorsFile"]

MAX_HEADER_BYTES = 2**22  # some 20,000 tensors
MAX_DIMENSIONS = 8
# Sizes of all dtypes of the format whose elements are whole bytes.
_ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}


class SafetensorsFile:
    """The tensors of an open file: listed and checked when it is made, read on demand.

    `file` stays the caller's to close. Raises `CorruptAdapterError`.
    """

    def __init__(self, file: BufferedReader) -> None:
        self._file = file
        size = os.fstat(file.fileno()).st_size
        header, data_start = _header(file, size)
        header.pop("__metadata__", None)
        extents = {name: _extent(name, entry) for name, entry in header.items()}
        _check_layout(extents, size - data_start)
        self._starts = {name: data_start + extent[0] for name, extent in extents.items()}
        self.infos: Mapping[str, TensorInfo] = {
            name: TensorInfo(tuple(entry["shape"]), entry["dtype"], extents[name][1] - extents[name][0])
            for name, entry in header.items()
        }

    def read(self, name: str) -> Tensor:
        """A tensor with memory of its own, in the file's dtype, which must be one of `DTYPES`."""
        info = self.infos[name]
        tensor = torch.empty(info.shape, dtype=DTYPES[info.dtype])
        self._file.seek(self._starts[name])
        if self._file.readinto(tensor.view(-1).view(torch.uint8).numpy().data) != info.num_bytes:
            raise CorruptAdapterError(f"the weights file was cut short while {name} was read: load it again")
        return tensor


def _header(file: BufferedReader, size: int) -> tuple[dict[str, Any], int]:
    """The header's JSON object, and where data starts."""
    length = int.from_bytes(file.read(8), "little")
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise CorruptAdapterError(
            f"the weights file has {size} bytes and claims a header of {length}: it is not a safetensors file"
        )
    try:
        header = json.loads(file.read(length).decode(), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise CorruptAdapterError(f"the header of the weights file is not JSON ({error}): save it again") from None
    if not isinstance(header, dict):
        raise CorruptAdapterError("the header of the weights file is no JSON object: save it again")
    return header, 8 + length


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a key stands in it twice")
    return content


def _extent(name: str, entry: Any) -> tuple[int, int]:
    """Where a tensor starts and ends, in bytes from the start of data."""
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, end]} if _are_sizes(*shape, start, end):
            item_bytes = _ITEM_BYTES.get(dtype)
            if item_bytes is not None and end - start != math.prod(shape) * item_bytes:
                raise CorruptAdapterError(
                    f"tensor {name} takes {end - start} bytes, which its shape {shape} and dtype {dtype} contradict: "
                    "save the adapter again"
                )
            return start, end
    raise CorruptAdapterError(f"the header of the weights file is damaged at tensor {name}: save the adapter again")


def _are_sizes(*values: Any) -> bool:
    """Of at most `MAX_DIMENSIONS` and two offsets: whole numbers from 0."""
    sizes = [value for value in values if isinstance(value, int) and not isinstance(value, bool) and value >= 0]
    return len(sizes) == len(values) <= MAX_DIMENSIONS + 2


def _check_layout(extents: Mapping[str, tuple[int, int]], size: int) -> None:
    """Tensors must follow each other without overlaps or holes, up to the end of the file."""
    position = 0
    for name, (start, end) in sorted(extents.items(), key=lambda item: item[1]):
        if start != position or end < start:
            raise CorruptAdapterError(f"tensor {name} overlaps others or leaves a hole: save the adapter again")
        position = end
    if position != size:
        raise CorruptAdapterError(
            f"the weights file has {size} bytes of data, its header says {position}: it is incomplete, copy it again"
        )

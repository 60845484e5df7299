"""Reads tensors that were saved by torch.save, without ever running what such a file can contain."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Mapping
from io import BufferedReader

import torch
from torch import Tensor

from mlserve.adapters.tensor_file import DTYPES, TensorInfo
from mlserve.errors import CorruptAdapterError, UnsupportedAdapterError

__all__ = ["TorchFile"]

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ADVICE = "convert it to safetensors where you trust it"


class TorchFile:
    """The tensors of an open file, all read when it is made, in no more memory than the file takes on disk.

    Such a file is a zip archive with a pickle in it, which is a program. Only torch's weights-only reader touches it.
    Raises `UnsupportedAdapterError` for one that holds anything but tensors, `CorruptAdapterError` for a damaged one.
    """

    def __init__(self, file: BufferedReader) -> None:
        _check_archive(file)
        self._tensors = _plain_tensors(_load(file))
        self.infos: Mapping[str, TensorInfo] = {
            name: TensorInfo(tuple(tensor.shape), _NAMES.get(tensor.dtype, str(tensor.dtype)), tensor.nbytes)
            for name, tensor in self._tensors.items()
        }

    def read(self, name: str) -> Tensor:
        """A contiguous tensor with memory of its own, in the file's dtype, which must be one of `DTYPES`."""
        return self._tensors[name].clone(memory_format=torch.contiguous_format)


def _check_archive(file: BufferedReader) -> None:
    """Nothing in the archive may be compressed: a small file could otherwise fill the memory."""
    size = os.fstat(file.fileno()).st_size
    try:
        entries = zipfile.ZipFile(file).infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise CorruptAdapterError(f"the weights file is no archive of torch.save ({error}): {_ADVICE}") from None
    compressed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
    if compressed or sum(entry.file_size for entry in entries) > size:
        raise CorruptAdapterError(f"the weights file is compressed, which torch.save never does: {_ADVICE}")
    file.seek(0)


def _load(file: BufferedReader) -> object:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise UnsupportedAdapterError(
            f"the weights file holds more than tensors, and reading it could run code ({reason}): {_ADVICE}"
        ) from None
    except Exception as error:  # a crafted archive can make the reader fail in any way
        raise CorruptAdapterError(f"the weights file is damaged ({type(error).__name__}: {error}): {_ADVICE}") from None


def _plain_tensors(content: object) -> dict[str, Tensor]:
    if not isinstance(content, dict):
        raise UnsupportedAdapterError(
            f"the weights file holds a {type(content).__name__}, no tensors by name: {_ADVICE}"
        )
    tensors = {}
    for name, value in content.items():
        if not (isinstance(name, str) and isinstance(value, Tensor) and _is_plain(value)):
            raise UnsupportedAdapterError(f"the weights file holds {name!r}, which is no plain tensor: {_ADVICE}")
        tensors[name] = value.detach()
    return tensors


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and tensor.nbytes <= tensor.untyped_storage().nbytes()  # no element stands for many
    )

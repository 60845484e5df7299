"""Opens the files of an adapter's folder, and only those."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from mlserve.adapters.safetensors_file import SafetensorsFile
from mlserve.adapters.tensor_file import TensorFile
from mlserve.adapters.torch_file import TorchFile
from mlserve.errors import AdapterFileNotFoundError, AdapterLimitError, CorruptAdapterError

__all__ = ["AdapterFolder"]

CONFIG_FILE = "adapter_config.json"
SAFETENSORS_FILE, TORCH_FILE = "adapter_model.safetensors", "adapter_model.bin"
MAX_CONFIG_BYTES = 2**22


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """A folder that PEFT or a trainer wrote. With a `root`, no file of it may lie outside, links or not."""

    path: Path
    root: Path | None = None

    def read_config(self) -> dict[str, Any]:
        """The object in adapter_config.json. Raises `AdapterFileNotFoundError`, `CorruptAdapterError`."""
        with self._open(CONFIG_FILE) as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
        try:
            if len(text) > MAX_CONFIG_BYTES:
                raise ValueError(f"more than {MAX_CONFIG_BYTES} bytes")
            content = json.loads(text.decode())
        except (ValueError, RecursionError) as error:
            raise CorruptAdapterError(f"{CONFIG_FILE} is not a config ({error}): save the adapter again") from None
        if not isinstance(content, dict):
            raise CorruptAdapterError(f"{CONFIG_FILE} holds no JSON object: save the adapter again")
        return content

    @contextmanager
    def open_tensors(self, max_bytes: int) -> Iterator[TensorFile]:
        """The weights, from safetensors if both kinds of file exist.

        Raises `AdapterFileNotFoundError`, `AdapterLimitError`, `CorruptAdapterError`, `UnsupportedAdapterError`.
        """
        self._check_folder()
        kind = SafetensorsFile if os.path.lexists(self.path / SAFETENSORS_FILE) else TorchFile
        name = SAFETENSORS_FILE if kind is SafetensorsFile else TORCH_FILE
        if kind is TorchFile and not os.path.lexists(self.path / TORCH_FILE):
            raise AdapterFileNotFoundError(
                f"it has neither {SAFETENSORS_FILE} nor {TORCH_FILE}: save the adapter again"
            )
        with self._open(name) as file:
            _check_size(name, os.fstat(file.fileno()).st_size, max_bytes)
            tensors = kind(file)
            # More than the file itself only if tensors overlap in memory, which torch.save allows.
            _check_size(name, sum(info.num_bytes for info in tensors.infos.values()), max_bytes)
            yield tensors

    def _check_folder(self) -> None:
        if not self.path.is_dir():
            raise AdapterFileNotFoundError("there is no such folder: give one that PEFT's save_pretrained wrote")

    def _open(self, name: str) -> BufferedReader:
        """Open a regular file; pipes, devices and what lies outside the root are refused."""
        self._check_folder()
        try:
            real = (self.path / name).resolve(strict=True)
            if self.root is not None and not real.is_relative_to(self.root.resolve()):
                raise CorruptAdapterError(f"{name} lies outside {self.root}: copy it to where adapters are kept")
            # `real` has no links in it. O_NONBLOCK: opening a pipe must not wait for somebody to write to it.
            descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise AdapterFileNotFoundError(f"{name} is missing: save the adapter again") from None
        except (OSError, RuntimeError, ValueError) as error:
            raise CorruptAdapterError(f"{name} can't be opened ({error}): check links and permissions") from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise CorruptAdapterError(f"{name} is not a regular file: save the adapter again")
        return os.fdopen(descriptor, "rb")


def _check_size(name: str, size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise AdapterLimitError(f"{name} has {size} bytes, limit {max_bytes}: raise max_adapter_bytes")

"""Tensors of a Hugging Face folder: one safetensors file, or several with an index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from mlserve.errors import CorruptWeightsError, ModelNotFoundError, UnsupportedModelError

__all__ = ["Checkpoint", "read_json"]

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_DTYPES = ("F32", "F16", "BF16")


class Checkpoint:
    """The tensors of a folder, opened and listed but not read."""

    def __init__(self, folder: Path) -> None:
        """Raises `CorruptWeightsError` for a damaged file, `UnsupportedModelError` for pickles and other dtypes."""
        self.files = _weight_files(folder)
        self._handles: dict[str, Any] = {}  # tensor name -> open file
        shapes: dict[str, tuple[int, ...]] = {}
        for path in self.files:
            handle = _open(path)
            for name in handle.keys():  # noqa: SIM118 (the handle isn't a mapping)
                if name in shapes:
                    raise CorruptWeightsError(f"tensor {name} is in more than one file of {folder}: remove stale files")
                info = handle.get_slice(name)
                if info.get_dtype() not in _DTYPES:
                    raise UnsupportedModelError(
                        f"tensor {name} is stored as {info.get_dtype()}, which is not served: use one of {_DTYPES}"
                    )
                shapes[name] = tuple(info.get_shape())
                self._handles[name] = handle
        self.shapes: Mapping[str, tuple[int, ...]] = shapes

    def read(self, name: str) -> Tensor:
        """A copy: later writes to the file must not reach the model."""
        tensor: Tensor = self._handles[name].get_tensor(name)
        return tensor.clone()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises `CorruptWeightsError` if it isn't one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptWeightsError(f"{path} is not JSON ({error}): download the model again") from None
    if not isinstance(content, dict):
        raise CorruptWeightsError(f"{path} holds no JSON object: download the model again")
    return content


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CorruptWeightsError(f"{index} has no weight_map: download the model again")
        names = sorted({str(name) for name in weight_map.values()})
        for name in names:
            if Path(name).name != name:
                raise CorruptWeightsError(
                    f"{index} names the file {name!r} outside its folder: download the model again"
                )
            if not (folder / name).is_file():
                raise CorruptWeightsError(f"{folder / name} is missing, though the index names it: download it again")
        return [folder / name for name in names]
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise UnsupportedModelError(
            f"{folder} has its weights as pickles, which can run code when they are read: convert them to safetensors"
        )
    raise ModelNotFoundError(f"{folder} has no {SINGLE_FILE}: give a folder with a model's config and weights")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CorruptWeightsError(f"{path} is damaged ({error}): download it again") from None

"""Adapters as files: copies of good ones with something changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

Change = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model.model."  # of the keys that PEFT writes
Q0 = f"{PREFIX}layers.0.self_attn.q_proj."


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    return config


def read_tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / WEIGHTS)


def write_files(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor] | bytes) -> Path:
    """An adapter's folder. Weights are tensors, in their order, or the bytes of a file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config))
    if isinstance(tensors, bytes):
        (folder / WEIGHTS).write_bytes(tensors)
    else:
        save_file(dict(tensors), folder / WEIGHTS)
    return folder


def changed_copy(
    source: Path,
    folder: Path,
    *,
    change: Change = lambda tensors: tensors,
    rename: Callable[[str], str] = lambda key: key,
    **settings: Any,
) -> Path:
    """A copy of an adapter with other settings (`...` removes one), keys or tensors."""
    config = {key: value for key, value in (read_config(source) | settings).items() if value is not ...}
    tensors = change(read_tensors(source))
    return write_files(folder, config, {rename(key): tensor for key, tensor in tensors.items()})


def without(*keys: str) -> Change:
    """A change that leaves tensors out."""
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key not in keys}


def with_tensors(added: Mapping[str, Tensor]) -> Change:
    """A change that adds tensors or puts them in the place of others."""
    return lambda tensors: tensors | dict(added)


def safetensors_bytes(header: Mapping[str, Any] | bytes, data: bytes = b"") -> bytes:
    """A safetensors file with a header that may be wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data

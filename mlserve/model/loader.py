"""Loading a model: from what the options name to a decoder that is ready to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash

from mlserve.config import EMBEDDED_MODEL, DType, ModelOptions
from mlserve.errors import ConfigError
from mlserve.kernels import Ops
from mlserve.kernels.dispatch import select
from mlserve.model.base_weights import FileBaseWeights
from mlserve.model.checkpoint import Checkpoint, read_json
from mlserve.model.config import DecoderConfig
from mlserve.model.decoder import Decoder
from mlserve.model.families import decoder_config, family_of
from mlserve.model.gguf import GGUFTensors, gguf_config
from mlserve.model.gguf_header import read_header
from mlserve.model.settings import wrong_setting
from mlserve.model.sources import find_model
from mlserve.model.text_part import TextTensors, text_config
from mlserve.model.weights import TensorSource, WeightBuilder, check_tensors

__all__ = ["TORCH_DTYPES", "LoadedModel", "OpenModel", "VisionCheckpoint", "load_model", "open_model"]

TORCH_DTYPES = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16}
_HASH_CHUNK = 2**24


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder and what an engine must know of its model."""

    decoder: Decoder
    tokenizer_source: Path  # a folder with tokenizer files, or a .gguf file
    chat_template: str | None  # in place of the tokenizer's own
    dtype: torch.dtype  # of stored weights
    digest: bytes  # of weights, config and dtype: models of one digest make the same KV
    eos_token_ids: tuple[int, ...]
    base_weights: FileBaseWeights  # the same weights again, from its files
    vision: VisionCheckpoint | None = None  # what a vision-language model has besides; yet to be opened

    @property
    def config(self) -> DecoderConfig:
        return self.decoder.config


@dataclass(frozen=True, slots=True)
class VisionCheckpoint:
    """A vision-language model's files, whole."""

    config: Mapping[str, Any]  # config.json
    folder: Path
    tensors: TensorSource


@dataclass(frozen=True, slots=True)
class _ModelFiles:
    """A model's files, opened but not read."""

    config: Mapping[str, Any]  # config.json, or what stands for it
    tensors: TensorSource
    weight_files: list[Path]
    norm_offset: float
    eos_token_ids: tuple[int, ...]
    tokenizer_source: Path
    vision: VisionCheckpoint | None = None
    chat_template: str | None = None


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model that was found and checked, but whose weights aren't read yet."""

    config: DecoderConfig
    files: _ModelFiles
    ops: Ops
    device: torch.device
    dtype: torch.dtype  # to store weights in

    @property
    def tensor_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of the tensors in its files, by their Hugging Face names."""
        return self.files.tensors.shapes


def open_model(options: ModelOptions) -> OpenModel:
    """Find a model and check it: everything but the data of its tensors. Raises what `load_model` does."""
    device = _device(options.device)
    ops = select(device, options.kernels)
    path = find_model(options.model)
    files = _open_gguf(path) if path.is_file() else _open_folder(path)
    config = decoder_config(files.config)
    check_tensors(config, files.tensors)
    return OpenModel(config, files, ops, device, TORCH_DTYPES[options.dtype])


def load_model(options: ModelOptions) -> LoadedModel:
    """Find a model, check it and read it. Only files that hold data are read; none that could run code.

    Raises `ModelNotFoundError`, `UnsupportedModelError`, `CorruptWeightsError`, or `ConfigError` for the options
    themselves. Either the whole model is loaded or none of it.
    """
    model = open_model(options)
    config, files, ops, dtype = model.config, model.files, model.ops, model.dtype
    weights = WeightBuilder(config, files.tensors, ops, dtype, model.device, files.norm_offset).build()
    return LoadedModel(
        decoder=Decoder(config, weights, ops),
        tokenizer_source=files.tokenizer_source,
        chat_template=files.chat_template,
        dtype=dtype,
        digest=_digest(files.weight_files, config, dtype),
        eos_token_ids=files.eos_token_ids,
        base_weights=FileBaseWeights(files.tensors, config, dtype),
        vision=files.vision,
    )


def _device(name: str) -> torch.device:
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device is {name!r}: give auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch finds no CUDA device: use cpu or auto")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _open_folder(folder: Path) -> _ModelFiles:
    whole = read_json(folder / "config.json")
    if "base_model" in whole:
        return _open_vision_part(folder, whole)
    config = text_config(whole)
    family = family_of(config)  # before weights are looked at: the architecture is the likelier thing to be wrong
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}
    eos = generation.get("eos_token_id", config.get("eos_token_id", whole.get("eos_token_id")))
    checkpoint = Checkpoint(folder)
    ends = _token_ids("eos_token_id", eos)
    if config is whole:
        return _ModelFiles(config, checkpoint, checkpoint.files, family.norm_offset, ends, folder)
    vision = VisionCheckpoint(whole, folder, checkpoint)
    tensors = TextTensors(checkpoint)
    return _ModelFiles(config, tensors, checkpoint.files, family.norm_offset, ends, folder, vision)


def _open_vision_part(folder: Path, config: Mapping[str, Any]) -> _ModelFiles:
    """A folder with tower and projector only, in front of the embedded model."""
    if config["base_model"] != EMBEDDED_MODEL:
        raise wrong_setting("base_model", config["base_model"], f"{EMBEDDED_MODEL!r}, or absent")
    base = _open_gguf(find_model(EMBEDDED_MODEL))
    checkpoint = Checkpoint(folder)
    template = folder / "chat_template.jinja"
    return replace(
        base,
        weight_files=[*base.weight_files, *checkpoint.files],
        vision=VisionCheckpoint(config, folder, checkpoint),
        chat_template=template.read_text(encoding="utf-8") if template.is_file() else None,
    )


def _open_gguf(path: Path) -> _ModelFiles:
    header = read_header(path)
    config = gguf_config(header)
    decoder_config(config)  # names a wrong setting before tensors are looked up by it
    fields = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    ends = [header.metadata[field] for field in fields if field in header.metadata]
    return _ModelFiles(config, GGUFTensors(header, config), [path], 0.0, _token_ids(fields[0], ends), path)


def _token_ids(key: str, value: Any) -> tuple[int, ...]:
    """A token id, a list of them, or none."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise wrong_setting(key, value, "a token id or a list of them")
    return tuple(dict.fromkeys(ids))


def _digest(files: list[Path], config: DecoderConfig, dtype: torch.dtype) -> bytes:
    """Digest of everything that the KV of a token depends on, besides the tokens."""
    digest = xxhash.xxh3_128(repr((config, dtype)).encode())
    for path in files:
        digest.update(path.stat().st_size.to_bytes(8, "little"))
        with path.open("rb") as file:
            while chunk := file.read(_HASH_CHUNK):
                digest.update(chunk)
    return digest.digest()

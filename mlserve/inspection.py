"""What a model or an adapter is and how much memory it takes, told without reading the model's weights."""

from __future__ import annotations

from math import prod

import torch

from mlserve.adapters.describe import describe_adapter
from mlserve.adapters.slots import slots_bytes
from mlserve.adapters.spec import AdapterLimits
from mlserve.config import CacheConfig, DType, EngineConfig
from mlserve.engine.build import CPU_KV_GIB, GIB, kv_dtype, lora_dtype, max_model_len, num_blocks
from mlserve.engine.memory import KV_SHARE, Claims
from mlserve.model.base_weights import FileBaseWeights, base_shape
from mlserve.model.config import DecoderConfig
from mlserve.model.loader import TORCH_DTYPES, OpenModel, open_model

__all__ = ["describe", "describe_for_model"]

MIB = 2**20


def describe(config: EngineConfig) -> str:
    """A table of what `mlserve inspect` shows: a fact a line. Raises `ModelError` or `ConfigError`."""
    model = open_model(config.model)
    length = max_model_len(config.model.max_model_len, model.config)
    facts = _architecture(model.config, length) | _memory(model, config, length)
    facts |= {"device": model.device.type, "kernels": model.ops.name}
    width = max(map(len, facts))
    return "\n".join([config.model.model, *(f"  {name:{width}}  {fact}" for name, fact in facts.items())])


def describe_for_model(path: str, config: EngineConfig) -> str:
    """What `mlserve adapters inspect` shows: an adapter, and whether the model can serve it under these options.

    Raises `ModelError` or `ConfigError`; what is wrong with the adapter is part of the text.
    """
    model = open_model(config.model)
    limits = AdapterLimits(config.adapters.max_lora_rank, config.adapters.max_adapter_bytes)
    weights = FileBaseWeights(model.files.tensors, model.config, model.dtype)
    return describe_adapter(path, base_shape(model.config), limits, base_weights=weights).text


def _architecture(model: DecoderConfig, length: int) -> dict[str, str]:
    windows = {layer.window for layer in model.layers if layer.window is not None}
    windowed = sum(layer.window is not None for layer in model.layers)
    sliding = f", {windowed} of them with a window of {', '.join(map(str, sorted(windows)))} tokens" if windows else ""
    return {
        "architecture": model.architecture,
        "layers": f"{model.num_layers}{sliding}",
        "hidden size": f"{model.hidden_size:,}, in the MLP {model.intermediate_size:,}",
        "heads": f"{model.num_heads} query, {model.num_kv_heads} key and value, of {model.head_dim}",
        "vocabulary": f"{model.vocab_size:,}, output layer {'tied' if model.tied_embeddings else 'of its own'}",
        "max length": f"{length:,} tokens, prompt and output",
    }


def _memory(model: OpenModel, config: EngineConfig, length: int) -> dict[str, str]:
    count, sizes = _parameters(model)
    dtype = kv_dtype(model.dtype, model.device)
    chosen = config.model.dtype
    adapters = config.adapters
    slot_dtype = lora_dtype(adapters, model.dtype, model.device)
    slots = slots_bytes(base_shape(model.config), adapters.max_loras, adapters.max_lora_rank, slot_dtype)
    claims = Claims(weights=sizes[chosen], adapters=slots)  # a running engine measures its activations, too
    blocks = num_blocks(config.cache, model.config, dtype, model.device, claims)
    per_token = model.config.kv_bytes_per_token(dtype)
    tokens = blocks * config.cache.block_size
    pool = (blocks + 1) * config.cache.block_size * per_token  # block 0 is never handed out
    others = ", ".join(f"{_size(size)} in {name}" for name, size in sizes.items() if name is not chosen)
    return {
        "parameters": f"{count:,}",
        "weights": f"{_size(sizes[chosen])} in {chosen} ({others})",
        "KV per token": f"{per_token:,} bytes in {str(dtype).removeprefix('torch.')}",
        "KV per block": f"{_size(per_token * config.cache.block_size)} for {config.cache.block_size} tokens",
        "KV pool": f"{blocks:,} blocks in {_size(pool)} ({_why(config.cache, model.device)})",
        "KV capacity": f"{tokens:,} tokens, {tokens / length:.1f} times the max length",
    }


def _parameters(model: OpenModel) -> tuple[int, dict[DType, int]]:
    """How many there are, and the bytes that they take for each choice of dtype. Norms are always float32."""
    unused = {"lm_head.weight"} if model.config.tied_embeddings else set()
    used = {
        name: prod(shape)
        for name, shape in model.tensor_shapes.items()
        if name.endswith((".weight", ".bias")) and name not in unused
    }
    count = sum(used.values())
    norms = sum(size for name, size in used.items() if name.endswith("norm.weight"))
    sizes = {
        name: (count - norms) * dtype.itemsize + norms * torch.float32.itemsize for name, dtype in TORCH_DTYPES.items()
    }
    return count, sizes


def _why(cache: CacheConfig, device: torch.device) -> str:
    if cache.num_blocks is not None:
        return "num_blocks"
    if cache.kv_memory is not None:
        return "kv_memory"
    return (
        f"default: {CPU_KV_GIB:g} GiB" if device.type == "cpu" else f"default: at most {KV_SHARE:.0%} of what is left"
    )


def _size(num_bytes: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes / 1024:.2f} KiB"

"""A GGUF file as a model: its metadata as a config.json, its tensors decoded and by their Hugging Face names.

llama.cpp's converter changes some tensors. Rows of Llama's query and key projections are interleaved for its rotation
of neighbouring pairs, which is undone here; Gemma's norm weights have their offset of 1 added, which the loader must
not repeat.

Decoded weights aren't kept on disk. SmolLM2 loads in 1.1 s; from a decoded copy it took 0.5 s, but 1.2 s if the copy
wasn't in the page cache, and the copy takes 0.9 s and 538 MB to write.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from mlserve.errors import CorruptWeightsError, UnsupportedModelError
from mlserve.model.gguf_header import GGUFHeader, TensorInfo
from mlserve.model.settings import Settings

__all__ = ["GGUFTensors", "gguf_config"]

ELEMENTS_AT_ONCE = (
    2**17
)  # decoding in chunks of 512 KB of float32 stays in the L2 cache: twice as fast as whole tensors

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
_SIZES = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "final_logit_softcapping": "final_logit_softcapping",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "num_experts": "expert_count",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER_NAMES = _LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ROPE_PARAMETERS = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
_ROPE_FACTORS = "rope_freqs.weight"
GEMMA3_27B_LAYERS = 62


def gguf_config(header: GGUFHeader) -> dict[str, Any]:
    """The config.json that the file's metadata stands for.

    Raises `UnsupportedModelError` for another architecture, `CorruptWeightsError` if the vocabulary can't be told.
    """
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise UnsupportedModelError(f"GGUF architecture {name!r} is not served: use a model with one of {known}")
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    if len(shapes.get("token_embd.weight", ())) != 2:
        raise CorruptWeightsError(f"{header.path} has no matrix token_embd.weight: fetch it again")
    config: dict[str, Any] = {"architectures": [_ARCHITECTURES[name]], "vocab_size": shapes["token_embd.weight"][0]}
    for key, field in _SIZES.items():
        if f"{name}.{field}" in header.metadata:
            config[key] = header.metadata[f"{name}.{field}"]
    config["tie_word_embeddings"] = "output.weight" not in shapes
    config["attention_bias"] = name != "qwen2" and "blk.0.attn_q.bias" in shapes
    config["mlp_bias"] = "blk.0.ffn_down.bias" in shapes
    config["rope_scaling"] = _rope_scaling(name, header)
    head_dim = Settings(config).size("head_dim", _default_head_dim(config))
    rotated = Settings(header.metadata).size(f"{name}.rope.dimension_count", head_dim)
    config["partial_rotary_factor"] = rotated / head_dim
    if name == "gemma3":
        config |= _gemma3_extras(config, head_dim, header)
    elif config.pop("sliding_window", None):
        raise UnsupportedModelError(f"a sliding window in a GGUF file of architecture {name} is not served")
    return config


def _default_head_dim(config: Mapping[str, Any]) -> int:
    settings = Settings(config)
    return settings.size("hidden_size") // settings.size("num_attention_heads")


def _gemma3_extras(config: Mapping[str, Any], head_dim: int, header: GGUFHeader) -> dict[str, Any]:
    """What only Gemma has. The attention scale isn't stored: as in llama.cpp, 62 layers tell the 27B model."""
    is_27b = config.get("num_hidden_layers") == GEMMA3_27B_LAYERS
    extras = {"query_pre_attn_scalar": _default_head_dim(config) if is_27b else head_dim}
    fields = {
        "sliding_window_pattern": "attention.sliding_window_pattern",
        "rope_local_base_freq": "rope.freq_base_swa",
    }
    extras |= {k: header.metadata[f"gemma3.{f}"] for k, f in fields.items() if f"gemma3.{f}" in header.metadata}
    return extras


def _rope_scaling(name: str, header: GGUFHeader) -> dict[str, Any] | None:
    for divisors in (tensor for tensor in header.tensors if tensor.name == _ROPE_FACTORS):
        # Llama 3's scaling, stored as one divisor for each frequency: longrope's formula with nothing else to it
        _check_place(divisors, header.path.stat().st_size)
        factors = _decode(divisors, _map(header)).tolist()
        return {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "factor": 1.0}
    stored = {
        field: header.metadata[f"{name}.rope.scaling.{field}"]
        for field in ("type", "attn_factor", *_ROPE_PARAMETERS)
        if f"{name}.rope.scaling.{field}" in header.metadata
    }
    kind = stored.get("type", "none")
    if kind == "none":
        return None
    if stored.get("attn_factor", 1.0) != 1.0:
        raise UnsupportedModelError(f"rope.scaling.attn_factor {stored['attn_factor']} is not served: use another file")
    wanted = _ROPE_PARAMETERS if kind == "yarn" else {"factor": "factor"}
    return {"rope_type": kind} | {ours: stored[theirs] for theirs, ours in wanted.items() if theirs in stored}


class GGUFTensors:
    """The tensors of a GGUF file under their Hugging Face names."""

    def __init__(self, header: GGUFHeader, config: Mapping[str, Any]) -> None:
        """`config` is what `gguf_config` made of the header, and valid.

        Raises `CorruptWeightsError` for a tensor that has no such name or lies beyond the file's end,
        `UnsupportedModelError` for one of an unknown quantisation.
        """
        is_gemma = config["architectures"] == ["Gemma3ForCausalLM"]
        layer_names = _GEMMA_LAYER_NAMES if is_gemma else _LAYER_NAMES
        tensors = [tensor for tensor in header.tensors if tensor.name != _ROPE_FACTORS]
        self._tensors = {_hugging_face_name(tensor.name, layer_names): tensor for tensor in tensors}
        if len(self._tensors) < len(tensors):
            raise CorruptWeightsError(f"{header.path} has two tensors of one name: fetch it again")
        self._bytes = _map(header)
        for tensor in tensors:
            _check_place(tensor, len(self._bytes))
        self._heads: dict[str, int] = {}  # projections whose rows are interleaved
        if config["architectures"] == ["LlamaForCausalLM"]:
            heads = config["num_attention_heads"]
            self._heads = {"attn_q": heads, "attn_k": config.get("num_key_value_heads", heads)}
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tensor.shape for name, tensor in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        """A tensor, decoded to float32."""
        tensor = self._tensors[name]
        decoded = _decode(tensor, self._bytes)
        heads = self._heads.get(tensor.name.split(".")[-2])
        return decoded if heads is None else _halves_apart(decoded, heads)


def _map(header: GGUFHeader) -> Any:
    return np.memmap(header.path, dtype=np.uint8, mode="r")


def _check_place(tensor: TensorInfo, file_size: int) -> None:
    try:
        block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.ggml_type)]
    except (ValueError, KeyError):
        raise UnsupportedModelError(
            f"tensor {tensor.name} has the unknown quantisation {tensor.ggml_type}: use another file"
        ) from None
    if not tensor.shape or tensor.shape[-1] % block_size:
        raise CorruptWeightsError(
            f"tensor {tensor.name} has shape {list(tensor.shape)}, but its quantisation goes by {block_size}: "
            "fetch the file again"
        )
    end = tensor.offset + prod(tensor.shape) // block_size * block_bytes
    if end > file_size:
        raise CorruptWeightsError(
            f"tensor {tensor.name} ends at byte {end}, but the file has {file_size}: fetch the file again"
        )


def _decode(tensor: TensorInfo, data: Any) -> Tensor:
    """Decode a tensor that `_check_place` has passed."""
    kind = GGMLQuantizationType(tensor.ggml_type)
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    num_blocks, step = prod(tensor.shape) // block_size, ELEMENTS_AT_ONCE // block_size
    raw = data[tensor.offset : tensor.offset + num_blocks * block_bytes]
    out = np.empty(num_blocks * block_size, dtype=np.float32)
    for block in range(0, num_blocks, step):
        chunk = raw[block * block_bytes : (block + step) * block_bytes]
        try:
            with np.errstate(all="ignore"):  # values that aren't finite are refused with their tensor's name, later
                decoded = dequantize(chunk[None], kind)[0]  # as one row: many rows would be cut into groups of 16
        except NotImplementedError:
            raise UnsupportedModelError(
                f"tensor {tensor.name} has the quantisation {kind.name}, which can't be decoded: use another file"
            ) from None
        out[block * block_size : block * block_size + len(decoded)] = decoded
    return torch.from_numpy(out).view(tensor.shape)


def _hugging_face_name(name: str, layer_names: Mapping[str, str]) -> str:
    layered = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layered and layered[2] in layer_names:
        return f"model.layers.{layered[1]}.{layer_names[layered[2]]}.{layered[3]}"
    module, _, kind = name.rpartition(".")
    if module in _TOP_NAMES:
        return f"{_TOP_NAMES[module]}.{kind}"
    raise CorruptWeightsError(f"tensor {name} is unknown: the file is of a model that is not served")


def _halves_apart(rows: Tensor, heads: int) -> Tensor:
    """Undo the interleaving of each head's first and second half: rows 0, D / 2, 1, D / 2 + 1, ... -> 0, 1, 2, ..."""
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)

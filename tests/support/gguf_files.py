"""Writes tiny random models as GGUF files, the way llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tiny import random_weights
from torch import Tensor

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_NAMES = _NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(
    path: Path,
    config: dict[str, Any],
    *,
    seed: int = 0,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, Tensor] | None = None,
) -> Path:
    """Write the model that `random_weights(config, seed)` gives, matrices quantised to `kind`. Returns `path`.

    `metadata` is added to the file's, or replaces it; `extra` tensors are written by the names they have.
    """
    arch = config["model_type"].removesuffix("_text")
    writer = GGUFWriter(path, arch)
    fields = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
    }
    if arch == "gemma3":
        fields["attention.sliding_window"] = config["sliding_window"]
    values = {f"{arch}.{key}": value for key, value in fields.items()} | {"tokenizer.ggml.eos_token_id": 257}
    for key, value in (values | (metadata or {})).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for name, tensor in random_weights(config, seed).items():
        stored = _as_llama_cpp_stores(name, tensor, config).numpy()
        to = kind if stored.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(_gguf_name(name, arch), quantize(np.ascontiguousarray(stored), to), raw_dtype=to)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str, arch: str) -> str:
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        layer, _, part = module.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{(_GEMMA_NAMES if arch == 'gemma3' else _NAMES)[part]}.{kind}"
    return f"{_NAMES[module]}.{kind}"


def _as_llama_cpp_stores(name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    module = name.split(".")[-2]
    if config["model_type"] == "llama" and module in heads:
        halves = tensor.view(heads[module], 2, -1, *tensor.shape[1:])
        return halves.transpose(1, 2).reshape(tensor.shape)
    if config["model_type"].startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1.0
    return tensor

"""Adapters of the embedded model with random weights, for the benchmarks: PEFT folders, written without PEFT."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, KV, INNER, LAYERS = 576, 192, 1536, 30
ATTENTION = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
}
ALL = ATTENTION | {
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}


def write_adapter(
    folder: Path,
    seed: int,
    *,
    modules: dict[str, tuple[int, int]] = ALL,
    rank: int = 8,
    dtype: torch.dtype = torch.float32,
    invocation_tokens: list[int] | None = None,
) -> Path:
    """Small enough weights that texts stay texts; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for module, (out, width) in modules.items():
            key = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, width, generator=generator) / width**0.5
            tensors[f"{key}.lora_B.weight"] = 0.02 * torch.randn(out, rank, generator=generator)
    save_file({key: tensor.to(dtype) for key, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": [module.partition(".")[2] for module in modules],
        "bias": "none",
    }
    if invocation_tokens is not None:
        config["alora_invocation_tokens"] = invocation_tokens
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder

"""A tiny random LLaVA whose tower is open_clip's: 28 pixels, patch 7, 3 layers; an image is 16 tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import open_clip
import torch
from safetensors.torch import load_file, save_file
from tiny_vision import write_tiny_vlm

TOWER = {"image_size": 28, "patch_size": 7, "width": 32, "head_width": 8, "layers": 3, "mlp_ratio": 2.0}
TEXT = {"context_length": 8, "vocab_size": 50, "width": 64, "heads": 1, "layers": 1}
PREPROCESS = {"size": 28, "mean": [0.48, 0.46, 0.41], "std": [0.27, 0.26, 0.28], "resize_mode": "shortest"}


def random_clip(seed: int = 0, quick_gelu: bool = True, **tower: Any) -> open_clip.CLIP:
    """The whole CLIP model whose image part is the tower."""
    vision_cfg, text_cfg = open_clip.CLIPVisionCfg(**{**TOWER, **tower}), open_clip.CLIPTextCfg(**TEXT)
    clip = open_clip.CLIP(16, vision_cfg, text_cfg, quick_gelu=quick_gelu).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in clip.visual.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.2 * noise if ".ln_" in name and name.endswith("weight") else 0.15 * noise
    return clip


def write_tiny_open_clip_llava(
    folder: Path,
    *,
    quick_gelu: bool = True,
    tower: dict[str, Any] | None = None,
    preprocess: dict[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """Write the model; `overrides` are keys of config.json, `tower` and `preprocess` of open_clip_config.json."""
    write_tiny_vlm(folder, "llava", **overrides)
    for name in ("preprocessor_config.json", "processor_config.json"):
        (folder / name).unlink()
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("vision_tower.")}
    visual = random_clip(quick_gelu=quick_gelu, **(tower or {})).visual.state_dict()
    tensors |= {f"vision_tower.{name}": tensor for name, tensor in visual.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"] = {"model_type": "open_clip"}
    (folder / "config.json").write_text(json.dumps(config))
    _write_config(folder, quick_gelu, tower or {}, preprocess or {})
    return folder


def write_clip(folder: Path, clip: open_clip.CLIP, quick_gelu: bool = True) -> None:
    """The whole model, as open_clip saves one."""
    save_file(clip.state_dict(), folder / "open_clip_model.safetensors")
    _write_config(folder, quick_gelu, {}, {})


def _write_config(folder: Path, quick_gelu: bool, tower: dict[str, Any], preprocess: dict[str, Any]) -> None:
    model = {
        "embed_dim": 16,
        "quick_gelu": quick_gelu,
        "vision_cfg": {**TOWER, **tower},
        "text_cfg": TEXT,
    }
    settings = {"model_cfg": model, "preprocess_cfg": {**PREPROCESS, **preprocess}}
    (folder / "open_clip_config.json").write_text(json.dumps(settings))

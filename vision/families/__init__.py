"""The families of models with images that are served."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mlserve.errors import UnsupportedModelError
from mlserve.vision.encoder import TensorSource, TextEncoder, VisionModel

__all__ = ["VISION_FAMILIES", "open_vision"]

# Architecture -> module here, function in it. They are imported when they are asked for: transformers takes seconds.
VISION_FAMILIES: Mapping[str, tuple[str, str]] = {
    "LlavaForConditionalGeneration": ("llava", "open_llava"),
    "LlavaNextForConditionalGeneration": ("llava_next", "open_llava_next"),
    "Idefics3ForConditionalGeneration": ("idefics3", "open_idefics3"),
    "SmolVLMForConditionalGeneration": ("idefics3", "open_smolvlm"),
    "Qwen2VLForConditionalGeneration": ("qwen2_vl", "open_qwen2_vl"),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_vl", "open_qwen2_5_vl"),
    "Gemma3ForConditionalGeneration": ("gemma3", "open_gemma3"),
}


def open_vision(
    config: Mapping[str, Any],
    folder: Path,
    tensors: TensorSource,
    encode_text: TextEncoder,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> VisionModel:
    """Open the vision part of a checkpoint.

    config: config.json, whole.
    folder: with preprocessor_config.json or processor_config.json.
    tensors: those of the whole checkpoint; only those of the vision part are read.
    encode_text: of the model's tokenizer.
    device: where to compute; by default on the CPU.
    dtype: of weights, and of what is computed with them.
    Only files that hold data are read; none that could run code.
    Raises `UnsupportedModelError` or `CorruptWeightsError`.
    """
    from mlserve.vision.families.opening import VisionFiles

    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    if not isinstance(name, str) or name not in VISION_FAMILIES:
        known = ", ".join(VISION_FAMILIES)
        raise UnsupportedModelError(f"architecture {name!r} is not served with images: use a model with one of {known}")
    module, function = VISION_FAMILIES[name]
    opener = getattr(importlib.import_module(f"{__name__}.{module}"), function)
    opened: VisionModel = opener(
        VisionFiles(config, folder, tensors, encode_text, device or torch.device("cpu"), dtype)
    )
    return opened

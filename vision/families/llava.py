"""LLaVA: a CLIP or SigLIP tower that takes squares of one size, and a projector of two layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlavaConfig, LlavaModel

from mlserve.errors import UnsupportedModelError
from mlserve.vision.encoder import ImageLayout
from mlserve.vision.families.opening import (
    Tower,
    VisionFiles,
    check_processed_size,
    load_tower,
    model_config,
    open_processor,
    without_language_part,
)
from mlserve.vision.families.tower_vision import TowerVision, check_token
from mlserve.vision.image import DecodedImage

__all__ = ["LlavaVision", "num_features", "open_llava", "prepare_tower_config"]

IMAGE_TOKEN = "<image>"
_CLASS_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}  # that a tower puts before the patches


def open_llava(files: VisionFiles) -> TowerVision:
    """Open `LlavaForConditionalGeneration`, with a tower of transformers' or of open_clip's."""
    vision_config = files.config.get("vision_config")
    if isinstance(vision_config, Mapping) and vision_config.get("model_type") == "open_clip":
        from mlserve.vision.families.open_clip_llava import open_open_clip_llava  # open_clip takes seconds to import

        return open_open_clip_llava(files)
    config = model_config(LlavaConfig, files)
    prepare_tower_config(config.vision_config)
    image_token = files.config.get("image_token", IMAGE_TOKEN)
    check_token(files.encode_text, image_token, config.image_token_id)
    processor = open_processor(files.folder)
    check_processed_size(processor, config.vision_config.image_size)
    module = without_language_part(LlavaModel, config, "language_model")
    return LlavaVision(load_tower(module, config.to_dict(), processor, files), config, image_token)


def prepare_tower_config(tower: Any) -> None:
    """Check a tower's config, and leave out of it what embeddings don't depend on. Raises `UnsupportedModelError`."""
    if tower.model_type not in _CLASS_TOKENS:
        raise UnsupportedModelError(
            f"a tower of type {tower.model_type!r} is not served: use a model with one of {', '.join(_CLASS_TOKENS)}"
        )
    tower.vision_use_head = False  # SigLIP's pooling, whose result nobody asks for


def num_features(config: Any) -> int:
    """How many features a LLaVA-type tower gives of one square: patches, and the class token unless it is dropped."""
    tower = config.vision_config
    num_patches: int = (tower.image_size // tower.patch_size) ** 2
    dropped = int(config.vision_feature_select_strategy == "default")
    return num_patches + _CLASS_TOKENS[tower.model_type] - dropped


class LlavaVision(TowerVision):
    """All images become squares of the same size, and the same number of tokens."""

    def __init__(self, tower: Tower, config: Any, image_token: str) -> None:
        super().__init__(tower, image_token, config.image_token_id, config.text_config.hidden_size)
        self._layout = ImageLayout.of([self.placeholder_id] * num_features(config), self.placeholder_id)

    def layout(self, width: int, height: int) -> ImageLayout:
        """See `VisionModel`."""
        return self._layout

    def _embed(self, images: Sequence[DecodedImage], inputs: Sequence[Mapping[str, Any]]) -> Sequence[Tensor]:
        pixels = torch.cat([self._tower.pixels(of_image) for of_image in inputs])
        embeddings: list[Tensor] = self._tower.module.get_image_features(pixels).pooler_output
        return embeddings

"""Gemma3: a SigLIP tower that takes squares of one size, whose patches are averaged to a smaller square."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Gemma3Config, Gemma3Model

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

__all__ = ["Gemma3Vision", "open_gemma3"]

BEGIN_TOKEN = "<start_of_image>"


def open_gemma3(files: VisionFiles) -> Gemma3Vision:
    """Open `Gemma3ForConditionalGeneration`."""
    config = model_config(Gemma3Config, files)
    _check_pooling(config)
    check_token(files.encode_text, BEGIN_TOKEN, config.boi_token_id)
    processor = open_processor(files.folder)
    if processor.do_pan_and_scan:
        raise UnsupportedModelError(
            "the image processor has do_pan_and_scan, whose crops are not served: set it to false"
        )
    check_processed_size(processor, config.vision_config.image_size)
    config.vision_config.vision_use_head = False  # a pooling whose result nobody asks for
    module = without_language_part(Gemma3Model, config, "language_model")
    return Gemma3Vision(load_tower(module, config.to_dict(), processor, files), config)


def _check_pooling(config: Any) -> None:
    patches = config.vision_config.image_size // config.vision_config.patch_size
    tokens = math.isqrt(config.mm_tokens_per_image)
    if tokens**2 != config.mm_tokens_per_image or patches % tokens:
        raise UnsupportedModelError(
            f"{patches}x{patches} patches can't be averaged to {config.mm_tokens_per_image} embeddings: "
            "mm_tokens_per_image must be the square of a number that divides image_size / patch_size"
        )


class Gemma3Vision(TowerVision):
    """All images become squares of the same size; embeddings of one see each other."""

    bidirectional = True
    surrounding_text = ("\n\n", "\n\n")

    def __init__(self, tower: Tower, config: Any) -> None:
        super().__init__(tower, BEGIN_TOKEN, config.image_token_id, config.text_config.hidden_size)
        embedded = [self.placeholder_id] * config.mm_tokens_per_image
        self._layout = ImageLayout.of([config.boi_token_id, *embedded, config.eoi_token_id], self.placeholder_id)

    def layout(self, width: int, height: int) -> ImageLayout:
        """See `VisionModel`."""
        return self._layout

    def _embed(self, images: Sequence[DecodedImage], inputs: Sequence[Mapping[str, Any]]) -> Sequence[Tensor]:
        pixels = torch.cat([self._tower.pixels(of_image) for of_image in inputs])
        embeddings: Tensor = self._tower.module.get_image_features(pixels).pooler_output  # [images, n, H]
        return embeddings.unbind()

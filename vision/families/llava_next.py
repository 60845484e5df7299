"""LLaVA-NeXT: the whole image as one square, then the image again in squares cut from a larger version ('anyres').

The larger version fits the image into the best of a few sizes, with bars beside it. The squares' features are put
together to one picture again, the bars are cut off, and each row of it ends in a learnt embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlavaNextConfig, LlavaNextModel
from transformers.image_processing_utils import select_best_resolution

from mlserve.errors import UnsupportedModelError
from mlserve.vision.encoder import ImageLayout
from mlserve.vision.families.llava import IMAGE_TOKEN, num_features, prepare_tower_config
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

__all__ = ["LlavaNextVision", "open_llava_next", "unpadded_size"]


def open_llava_next(files: VisionFiles) -> LlavaNextVision:
    """Open `LlavaNextForConditionalGeneration`."""
    config = model_config(LlavaNextConfig, files)
    prepare_tower_config(config.vision_config)
    check_token(files.encode_text, IMAGE_TOKEN, config.image_token_id)
    processor = open_processor(files.folder)
    _check_tiles(processor, config)
    check_processed_size(processor, config.vision_config.image_size)
    module = without_language_part(LlavaNextModel, config, "language_model")
    return LlavaNextVision(load_tower(module, config.to_dict(), processor, files), config)


def _check_tiles(processor: Any, config: Any) -> None:
    tower = config.vision_config
    made, wanted = ([list(size) for size in of.image_grid_pinpoints] for of in (processor, config))
    if made != wanted:
        raise UnsupportedModelError(
            f"the image processor has image_grid_pinpoints {made}, the model {wanted}: preprocessor_config.json and "
            "config.json are of different models"
        )
    if any(side % tower.image_size for size in wanted for side in size):
        raise UnsupportedModelError(
            f"image_grid_pinpoints are {wanted}: sides must be multiples of the tower's image_size {tower.image_size}"
        )
    if num_features(config) != (tower.image_size // tower.patch_size) ** 2:
        raise UnsupportedModelError(
            f"the tower gives {num_features(config)} features of a square with vision_feature_select_strategy "
            f"{config.vision_feature_select_strategy!r}: exactly those of its patches are served"
        )


def unpadded_size(width: int, height: int, columns: int, rows: int) -> tuple[int, int]:
    """Columns and rows of features that an image leaves of a picture of them when the bars beside it are cut off.

    Rounds as transformers' `unpad_image` does.
    """
    if width / height > columns / rows:
        used = int(round(height * (columns / width), 7))
        return columns, rows - (rows - used) // 2 * 2
    used = int(round(width * (rows / height), 7))
    return columns - (columns - used) // 2 * 2, rows


class LlavaNextVision(TowerVision):
    """Images of any size; the number of embeddings depends on the shape."""

    def __init__(self, tower: Tower, config: Any) -> None:
        super().__init__(tower, IMAGE_TOKEN, config.image_token_id, config.text_config.hidden_size)
        self._sizes = [tuple(size) for size in config.image_grid_pinpoints]
        self._patch_size = config.vision_config.patch_size
        self._num_features = num_features(config)

    def layout(self, width: int, height: int) -> ImageLayout:
        """See `VisionModel`."""
        best_height, best_width = select_best_resolution((height, width), self._sizes)
        columns, rows = unpadded_size(width, height, best_width // self._patch_size, best_height // self._patch_size)
        count = self._num_features + rows * (columns + 1)
        return ImageLayout((self.placeholder_id,) * count, ((0, count),))

    def _embed(self, images: Sequence[DecodedImage], inputs: Sequence[Mapping[str, Any]]) -> Sequence[Tensor]:
        squares = torch.cat([self._tower.pixels(of_image)[0] for of_image in inputs])  # [squares of all, 3, S, S]
        sizes = torch.tensor([(image.height, image.width) for image in images])
        embeddings: list[Tensor] = self._tower.module.get_image_features(squares, image_sizes=sizes).pooler_output
        return embeddings

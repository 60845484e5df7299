"""Qwen2-VL and Qwen2.5-VL: towers that take images of any size, and merge neighbouring patches to one embedding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from mlserve.errors import ImageLimitError, UnsupportedModelError
from mlserve.vision.encoder import ImageLayout
from mlserve.vision.families.opening import (
    Tower,
    VisionFiles,
    load_tower,
    model_config,
    open_processor,
    without_weights,
)
from mlserve.vision.families.tower_vision import TowerVision, check_token
from mlserve.vision.image import DecodedImage

__all__ = ["Qwen2Vision", "open_qwen2_5_vl", "open_qwen2_vl", "resized_size"]

IMAGE_TOKEN = "<|image_pad|>"
MAX_RATIO = 200  # of an image's sides, which the image processor takes
_LAYOUTS_KEPT = 256


def resized_size(width: int, height: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Width and height, multiples of `factor`, to which the image processor resizes an image.

    They are as near to the image's as `min_pixels` to `max_pixels` allow, with about its ratio of sides.
    """
    new_width, new_height = round(width / factor) * factor, round(height / factor) * factor
    if new_width * new_height > max_pixels:
        shrink = math.sqrt(width * height / max_pixels)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
    elif new_width * new_height < min_pixels:
        enlarge = math.sqrt(min_pixels / (width * height))
        new_width = math.ceil(width * enlarge / factor) * factor
        new_height = math.ceil(height * enlarge / factor) * factor
    return new_width, new_height


def open_qwen2_vl(files: VisionFiles) -> Qwen2Vision:
    """Open `Qwen2VLForConditionalGeneration`."""
    return _open(Qwen2VLConfig, Qwen2VisionTransformerPretrainedModel, "hidden_size", files)


def open_qwen2_5_vl(files: VisionFiles) -> Qwen2Vision:
    """Open `Qwen2_5_VLForConditionalGeneration`."""
    return _open(Qwen2_5_VLConfig, Qwen2_5_VisionTransformerPretrainedModel, "out_hidden_size", files)


def _open(config_class: Any, tower_class: Any, size_key: str, files: VisionFiles) -> Qwen2Vision:
    config = model_config(config_class, files)
    check_token(files.encode_text, IMAGE_TOKEN, config.image_token_id)
    processor = open_processor(files.folder)
    _check_processor(processor, config.vision_config)
    module = without_weights(lambda: tower_class(config.vision_config))
    tower = load_tower(module, config.to_dict(), processor, files, prefix="visual.")
    return Qwen2Vision(tower, config.image_token_id, getattr(config.vision_config, size_key))


def _check_processor(processor: Any, tower: Any) -> None:
    made = (processor.patch_size, processor.merge_size, processor.temporal_patch_size)
    wanted = (tower.patch_size, tower.spatial_merge_size, tower.temporal_patch_size)
    if made != wanted:
        raise UnsupportedModelError(
            f"the image processor has patch_size, merge_size and temporal_patch_size {made}, the tower {wanted}: "
            "preprocessor_config.json and config.json are of different models"
        )
    if not processor.do_resize:
        raise UnsupportedModelError("the image processor has do_resize False: only resized images are served")


class Qwen2Vision(TowerVision):
    """An image keeps its size, in steps of what one embedding covers."""

    uses_mrope = True

    def __init__(self, tower: Tower, placeholder_id: int, hidden_size: int) -> None:
        super().__init__(tower, IMAGE_TOKEN, placeholder_id, hidden_size)
        self._layout_of_grid = lru_cache(_LAYOUTS_KEPT)(self._make_layout)

    def layout(self, width: int, height: int) -> ImageLayout:
        """See `VisionModel`."""
        if max(width, height) > MAX_RATIO * min(width, height):
            raise ImageLimitError(f"the image is of {width}x{height} pixels, side ratio limit {MAX_RATIO}: crop it")
        processor = self._tower.processor
        factor, size = processor.patch_size * processor.merge_size, processor.size
        resized = resized_size(width, height, factor, size["shortest_edge"], size["longest_edge"])
        return self._layout_of_grid(resized[1] // factor, resized[0] // factor)

    def _make_layout(self, rows: int, columns: int) -> ImageLayout:
        return ImageLayout.of([self.placeholder_id] * (rows * columns), self.placeholder_id, (1, rows, columns))

    def _embed(self, images: Sequence[DecodedImage], inputs: Sequence[Mapping[str, Any]]) -> Sequence[Tensor]:
        patches = torch.cat([self._tower.pixels(of_image) for of_image in inputs])  # [patches of all, C * T * P * P]
        grids = torch.cat([of_image["image_grid_thw"] for of_image in inputs])  # [images, 3], in patches
        embeddings: Tensor = self._tower.module(patches, grid_thw=grids.to(self._tower.device)).pooler_output
        merged = self._tower.processor.merge_size**2
        return torch.split(embeddings, (grids.prod(dim=1) // merged).tolist())

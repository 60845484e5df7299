"""Idefics3 and SmolVLM: an image is cut into square tiles, which are followed by the whole image as one more tile.

Neighbouring patches of a tile are then joined to one embedding ('pixel shuffle'), `scale_factor` in each direction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import Idefics3Config, Idefics3Model, SmolVLMConfig, SmolVLMModel

from mlserve.errors import UnsupportedModelError
from mlserve.vision.encoder import ImageLayout, TextEncoder
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

__all__ = ["Idefics3Vision", "Tiling", "open_idefics3", "open_smolvlm"]

IMAGE_TOKEN, EDGE_TOKEN, WHOLE_TOKEN = "<image>", "<fake_token_around_image>", "<global-img>"
MAX_SIDE = 4096  # transformers' bound on a resized image, before it is cut
_LAYOUTS_KEPT = 256


@dataclass(frozen=True, slots=True)
class Tiling:
    """How transformers' image processor cuts an image."""

    side: int  # of a tile, in pixels
    longest_edge: int  # of the resized image, in pixels
    splits: bool  # whether images are cut at all

    @classmethod
    def of(cls, processor: Any) -> Tiling:
        """As a processor's settings have it. Raises `UnsupportedModelError`."""
        longest_edge, side = processor.size["longest_edge"], processor.max_image_size["longest_edge"]
        if not (processor.do_resize and longest_edge and side):
            raise UnsupportedModelError(
                f"the image processor has do_resize {processor.do_resize}, size {processor.size} and max_image_size "
                f"{processor.max_image_size}: only resizing to a longest_edge is served"
            )
        return cls(side, longest_edge, bool(processor.do_image_splitting))

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of tiles of an image of that size; (0, 0) if it isn't cut.

        Follows `resize` and `resize_for_vision_encoder` of the image processor step by step, for the same rounding. Its
        own `get_number_of_image_patches` rounds differently.
        """
        if not self.splits:
            return 0, 0
        width, height = _resized(width, height, self.longest_edge)
        ratio = width / height
        if width >= height:
            columns = math.ceil(width / self.side)
            rows = math.ceil(int(columns * self.side / ratio) / self.side)
        else:
            rows = math.ceil(height / self.side)
            columns = math.ceil(int(rows * self.side * ratio) / self.side)
        return (rows, columns) if max(rows, columns) > 1 else (0, 0)


def _resized(width: int, height: int, longest_edge: int) -> tuple[int, int]:
    """The longer side becomes `longest_edge`, the other one the next even number; then `MAX_SIDE` bounds both."""
    shorter = int(longest_edge / (width / height)) if width >= height else int(longest_edge * (width / height))
    shorter = max(1, shorter + shorter % 2)
    width, height = (longest_edge, shorter) if width >= height else (shorter, longest_edge)
    if max(width, height) > MAX_SIDE:
        ratio = width / height
        width, height = (MAX_SIDE, int(MAX_SIDE / ratio)) if width >= height else (int(MAX_SIDE * ratio), MAX_SIDE)
    return max(1, width), max(1, height)


def open_idefics3(files: VisionFiles) -> Idefics3Vision:
    """Open `Idefics3ForConditionalGeneration`."""
    return _open(Idefics3Config, Idefics3Model, files)


def open_smolvlm(files: VisionFiles) -> Idefics3Vision:
    """Open `SmolVLMForConditionalGeneration`."""
    return _open(SmolVLMConfig, SmolVLMModel, files)


def _open(config_class: Any, model_class: Any, files: VisionFiles) -> Idefics3Vision:
    config = model_config(config_class, files)
    check_token(files.encode_text, IMAGE_TOKEN, config.image_token_id)
    processor = open_processor(files.folder)
    check_processed_size(processor, config.vision_config.image_size)
    module = without_language_part(model_class, config, "text_model")
    return Idefics3Vision(load_tower(module, config.to_dict(), processor, files), config, files.encode_text)


class Idefics3Vision(TowerVision):
    """Images of any size; each tile is the same number of embeddings."""

    def __init__(self, tower: Tower, config: Any, encode_text: TextEncoder) -> None:
        super().__init__(tower, IMAGE_TOKEN, config.image_token_id, config.text_config.hidden_size)
        vision = config.vision_config
        num_patches = vision.image_size // vision.patch_size
        if num_patches % config.scale_factor:
            raise UnsupportedModelError(
                f"{num_patches} patches a side can't be joined by {config.scale_factor}: scale_factor must divide "
                "image_size / patch_size"
            )
        self._tiling = Tiling.of(tower.processor)
        self._tile_text = IMAGE_TOKEN * (num_patches // config.scale_factor) ** 2
        self._encode_text = encode_text
        self._layout_of_grid = lru_cache(_LAYOUTS_KEPT)(self._make_layout)

    def layout(self, width: int, height: int) -> ImageLayout:
        """See `VisionModel`."""
        return self._layout_of_grid(*self._tiling.grid(width, height))

    def _make_layout(self, rows: int, columns: int) -> ImageLayout:
        """A line of tokens for each row of tiles, an empty line, the whole image."""
        lines = [
            "".join(f"{EDGE_TOKEN}<row_{row}_col_{column}>{self._tile_text}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        ]
        lines += ["\n"] * bool(lines) + [EDGE_TOKEN, WHOLE_TOKEN, self._tile_text, EDGE_TOKEN]
        return ImageLayout.of(self._encode_text("".join(lines)), self.placeholder_id)

    def _embed(self, images: Sequence[DecodedImage], inputs: Sequence[Mapping[str, Any]]) -> Sequence[Tensor]:
        tiles = [self._tower.pixels(of_image)[0] for of_image in inputs]  # each [tiles, 3, side, side]
        # Not transformers' `get_image_features`, which takes a tile of nothing but zeros for padding.
        module = self._tower.module
        features = module.connector(module.vision_model(torch.cat(tiles)).last_hidden_state)  # [tiles, n, H]
        return [of_image.flatten(0, 1) for of_image in features.split([len(of_image) for of_image in tiles])]

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_vision import open_tiny_vlm, write_tiny_vlm
from transformers import Idefics3ImageProcessor, SmolVLMImageProcessor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from mlserve.errors import UnsupportedModelError
from mlserve.vision.encoder import VisionModel
from mlserve.vision.families.idefics3 import Tiling
from mlserve.vision.image import DecodedImage

PROCESSORS = [Idefics3ImageProcessor, Idefics3ImageProcessorPil, SmolVLMImageProcessor]
rng = random.Random(0)
SIZES = [(1, 1), (1, 300), (300, 1), (28, 28), (112, 112), (113, 112), (2, 3)]
SIZES += [(rng.randrange(1, 300), rng.randrange(1, 300)) for _ in range(100)]


def processor_grid(processor: Any, width: int, height: int) -> tuple[int, int]:
    made = processor(images=[Image.new("RGB", (width, height))], return_row_col_info=True)
    return made["rows"][0][0], made["cols"][0][0]


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> VisionModel:
    return open_tiny_vlm(write_tiny_vlm(tmp_path_factory.mktemp("vlm"), "idefics3"))


@pytest.mark.parametrize("longest_edge", [112, 130, 28, 20])
@pytest.mark.parametrize("processor_class", PROCESSORS, ids=lambda c: c.__name__)
def test_grid_is_the_image_processors(processor_class: Any, longest_edge: int) -> None:
    processor = processor_class(size={"longest_edge": longest_edge}, max_image_size={"longest_edge": 28})
    tiling = Tiling.of(processor)
    for width, height in SIZES:
        assert tiling.grid(width, height) == processor_grid(processor, width, height), (width, height)


@pytest.mark.parametrize("size", [(640, 480), (1365, 2048), (512, 512), (3000, 100)], ids=str)
def test_grid_at_smolvlms_own_size(size: tuple[int, int]) -> None:
    processor = SmolVLMImageProcessor(size={"longest_edge": 2048}, max_image_size={"longest_edge": 512})
    assert Tiling.of(processor).grid(*size) == processor_grid(processor, *size)


def test_grid_of_images_that_are_not_cut() -> None:
    processor = Idefics3ImageProcessor(do_image_splitting=False)
    assert Tiling.of(processor).grid(500, 300) == processor_grid(processor, 500, 300) == (0, 0)


@pytest.mark.parametrize("settings", [{"do_resize": False}, {"size": {"height": 56, "width": 56}}], ids=str)
def test_other_ways_of_resizing_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="only resizing to a longest_edge is served"):
        Tiling.of(Idefics3ImageProcessor(**settings))


def test_layout(vision: VisionModel) -> None:
    """56x112: 4 rows and 2 columns of tiles, and the whole; 4 embeddings each."""
    layout = vision.layout(56, 112)
    edge, whole, first_tile = 262, 263, 265
    tile = [vision.placeholder_id] * 4
    expected: list[int] = []
    for row in range(4):
        for column in range(2):
            expected += [edge, first_tile + 6 * row + column, *tile]
        expected.append(10)
    expected += [10, edge, whole, *tile, edge]
    assert list(layout.token_ids) == expected
    assert layout.num_embeddings == 36
    assert layout.embedded[:2] == ((2, 6), (8, 12))
    assert layout.grid is None


def test_layout_depends_on_the_grid_only(vision: VisionModel) -> None:
    assert vision.layout(56, 112) is vision.layout(57, 113)
    assert vision.layout(56, 112) != vision.layout(112, 56)


def test_black_is_an_image(tmp_path: Path) -> None:
    """Pixels that are 0 after normalising are what transformers takes for padding."""
    folder = write_tiny_vlm(tmp_path, "smolvlm", image_processor={"do_normalize": False})
    vision = open_tiny_vlm(folder)
    black = DecodedImage(np.zeros((40, 40, 3), np.uint8))
    white = DecodedImage(np.full((40, 40, 3), 255, np.uint8))
    first, second = vision.encode([black, white])
    assert first.shape == second.shape == (vision.layout(40, 40).num_embeddings, 64)
    assert torch.isfinite(first).all()
    assert (first - second).abs().max() > 0.1


def test_patches_that_cannot_be_joined_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_vlm(tmp_path, "idefics3", scale_factor=3)
    with pytest.raises(UnsupportedModelError, match=r"4 patches a side can't be joined by 3"):
        open_tiny_vlm(folder)

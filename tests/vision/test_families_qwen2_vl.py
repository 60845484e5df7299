from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tiny_vision import open_tiny_vlm, write_tiny_vlm
from transformers import Qwen2VLImageProcessor

from mlserve.errors import ImageLimitError, UnsupportedModelError
from mlserve.vision.encoder import VisionModel
from mlserve.vision.families.qwen2_vl import resized_size

rng = random.Random(0)
SIZES = [(1, 1), (200, 1), (1, 200), (12, 20), (64, 64), (65, 64)]
SIZES += [(rng.randrange(1, 200), rng.randrange(1, 200)) for _ in range(100)]


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> VisionModel:
    return open_tiny_vlm(write_tiny_vlm(tmp_path_factory.mktemp("vlm"), "qwen2-vl"))


@pytest.mark.parametrize(("patch", "limits"), [(4, (256, 4096)), (14, (3136, 40000)), (5, (1000, 1000))], ids=str)
def test_resized_size_is_the_image_processors(patch: int, limits: tuple[int, int]) -> None:
    processor = Qwen2VLImageProcessor(patch_size=patch, min_pixels=limits[0], max_pixels=limits[1])
    for width, height in SIZES:
        made = processor(images=Image.new("RGB", (width, height)), return_tensors="pt")["image_grid_thw"][0]
        found = resized_size(width, height, 2 * patch, *limits)
        assert [1, found[1] // patch, found[0] // patch] == made.tolist(), (width, height)


def test_layout(vision: VisionModel) -> None:
    layout = vision.layout(24, 41)  # 3 x 5 embeddings of 8 pixels
    assert layout.grid == (1, 5, 3)
    assert layout.token_ids == (vision.placeholder_id,) * 15
    assert layout.embedded == ((0, 15),)
    assert layout.num_embeddings == 15


def test_smallest_and_largest_image(vision: VisionModel) -> None:
    assert vision.layout(1, 1).num_embeddings == 4
    assert vision.layout(4000, 4000).grid == (1, 8, 8)


def test_long_images_are_refused(vision: VisionModel) -> None:
    assert vision.layout(200, 1).grid is not None
    with pytest.raises(ImageLimitError, match="201x1 pixels, side ratio limit 200"):
        vision.layout(201, 1)
    with pytest.raises(ImageLimitError, match="1x201"):
        vision.layout(1, 201)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"patch_size": 7}, r"\(7, 2, 2\), the tower \(4, 2, 2\)"),
        ({"merge_size": 1}, r"\(4, 1, 2\), the tower \(4, 2, 2\)"),
        ({"temporal_patch_size": 1}, r"\(4, 2, 1\), the tower \(4, 2, 2\)"),
        ({"do_resize": False}, "do_resize False"),
    ],
    ids=str,
)
def test_image_processors_that_do_not_fit(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write_tiny_vlm(tmp_path, "qwen2-vl", image_processor=settings)
    with pytest.raises(UnsupportedModelError, match=message):
        open_tiny_vlm(folder)


def test_config_of_early_checkpoints(tmp_path: Path) -> None:
    """Text settings at the top level, as Qwen published them, and names of old settings of the tower."""
    folder = write_tiny_vlm(tmp_path, "qwen2-vl")
    expected = open_tiny_vlm(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= config.pop("text_config") | {"model_type": "qwen2_vl", "architectures": config["architectures"]}
    config["vision_config"] |= {"in_chans": 3, "spatial_patch_size": 4, "model_type": "qwen2_vl"}
    (folder / "config.json").write_text(json.dumps(config))
    found = open_tiny_vlm(folder)
    assert found.hidden_size == 64
    assert found.placeholder_id == expected.placeholder_id
    assert found.layout(40, 40) == expected.layout(40, 40)


def test_rotary_frequencies_stay_float32(tmp_path: Path) -> None:
    vision: Any = open_tiny_vlm(write_tiny_vlm(tmp_path, "qwen2-vl"), dtype=torch.bfloat16)
    tower = vision._tower.module
    assert {parameter.dtype for parameter in tower.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in tower.buffers()} == {torch.float32}

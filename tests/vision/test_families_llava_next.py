from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_vision import open_tiny_vlm, write_tiny_vlm
from transformers.models.llava_next.modeling_llava_next import unpad_image

from mlserve.errors import UnsupportedModelError
from mlserve.vision.families.llava_next import unpadded_size

rng = random.Random(0)
SIZES = [(1, 1), (1, 900), (900, 1), (336, 672)]
SIZES += [(rng.randrange(1, 1500), rng.randrange(1, 1500)) for _ in range(300)]


@pytest.mark.parametrize("grid", [(24, 48), (48, 24), (48, 48), (72, 24), (8, 4)], ids=str)
def test_unpadded_size_is_transformers(grid: tuple[int, int]) -> None:
    columns, rows = grid
    features = torch.zeros(1, rows, columns)
    for width, height in SIZES:
        _, left_rows, left_columns = unpad_image(features, (height, width)).shape
        assert unpadded_size(width, height, columns, rows) == (left_columns, left_rows), (width, height)


def test_layout(tmp_path: Path) -> None:
    """56x56 is a square of 8x8 patches in four tiles: 16 for the whole, and 8 rows of 8 with the end of a row."""
    vision = open_tiny_vlm(write_tiny_vlm(tmp_path, "llava-next"))
    layout = vision.layout(56, 56)
    assert layout.token_ids == (vision.placeholder_id,) * (16 + 8 * 9)
    assert layout.embedded == ((0, 88),)
    assert vision.layout(56, 28).num_embeddings == 16 + 4 * 9
    assert vision.layout(1, 1000).num_embeddings == 16 + 4  # rounded away to the ends of rows


SIGLIP = {"model_type": "siglip_vision_model"}


@pytest.mark.parametrize(
    ("config", "processor", "message"),
    [
        ({"image_grid_pinpoints": [[28, 28]]}, {}, r"the model \[\[28, 28\]\]"),
        (
            {"image_grid_pinpoints": [[28, 30]]},
            {"image_grid_pinpoints": [[28, 30]]},
            "multiples of the tower's image_size 28",
        ),
        ({"vision_feature_select_strategy": "full"}, {}, "gives 17 features of a square with .* 'full'"),
        ({"vision_config": SIGLIP}, {}, "gives 15 features of a square with .* 'default'"),
    ],
    ids=["other-sizes", "odd-sizes", "class-token", "no-class-token"],
)
def test_tiles_that_do_not_fit(config: dict[str, Any], processor: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write_tiny_vlm(tmp_path, "llava-next", image_processor=processor, **config)
    with pytest.raises(UnsupportedModelError, match=message):
        open_tiny_vlm(folder)

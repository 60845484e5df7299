from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_vision import write_tiny_vlm
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2VLForConditionalGeneration

from mlserve.vision.families.mrope import mrope_positions

Grid = tuple[int, int, int]
# Lengths of text, and grids of images.
PROMPTS: dict[str, list[int | Grid]] = {
    "one-image": [3, (1, 2, 5), 4],
    "tall": [3, (1, 7, 2), 4],
    "one-embedding": [2, (1, 1, 1), 2],
    "two-images": [1, (1, 3, 3), 2, (1, 2, 6), 9],
    "image-at-the-ends": [(1, 4, 3), 1, (1, 2, 2)],
}


def lay_out(prompt: list[int | Grid]) -> tuple[int, list[tuple[int, Grid]]]:
    index, images = 0, []
    for part in prompt:
        if isinstance(part, int):
            index += part
        else:
            images.append((index, part))
            index += part[0] * part[1] * part[2]
    return index, images


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    classes = {"qwen2-vl": Qwen2VLForConditionalGeneration, "qwen2.5-vl": Qwen2_5_VLForConditionalGeneration}
    folders = {family: write_tiny_vlm(tmp_path_factory.mktemp(family), family) for family in classes}
    return [classes[family].from_pretrained(folder).model for family, folder in folders.items()]


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_positions_are_transformers(prompt: list[int | Grid], models: list[Any]) -> None:
    num_tokens, images = lay_out(prompt)
    is_image = torch.zeros(1, num_tokens, dtype=torch.int32)
    for start, grid in images:
        is_image[0, start : start + grid[0] * grid[1] * grid[2]] = 1
    patch_grids = torch.tensor([(frames, 2 * rows, 2 * columns) for _, (frames, rows, columns) in images])
    for model in models:
        ids = torch.zeros(1, num_tokens, dtype=torch.int64)
        expected, delta = model.get_rope_index(ids, mm_token_type_ids=is_image, image_grid_thw=patch_grids)
        positions, offset = mrope_positions(num_tokens, images)
        assert positions.dtype == torch.int64
        assert positions.tolist() == expected[:, 0].tolist()
        assert offset == delta.item()


def test_positions_by_hand() -> None:
    """Two tokens, an image of 2 rows and 3 columns, two tokens."""
    positions, offset = mrope_positions(10, [(2, (1, 2, 3))])
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]
    assert offset == -3


def test_text_only() -> None:
    positions, offset = mrope_positions(5, [])
    assert positions.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert offset == 0


IMPOSSIBLE: dict[str, list[tuple[int, Grid]]] = {
    "too-long": [(5, (1, 2, 2))],
    "overlapping": [(0, (1, 2, 2)), (3, (1, 1, 1))],
}


@pytest.mark.parametrize("images", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_impossible_places(images: list[tuple[int, Grid]]) -> None:
    with pytest.raises(ValueError, match="give images in order"):
        mrope_positions(8, images)

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_vision import FIRST_UNUSED, open_tiny_vlm, write_tiny_vlm

from mlserve.errors import UnsupportedModelError


def test_layout(tmp_path: Path) -> None:
    vision = open_tiny_vlm(write_tiny_vlm(tmp_path, "gemma3"))
    begin, end, placeholder = FIRST_UNUSED, FIRST_UNUSED + 1, FIRST_UNUSED + 2
    layout = vision.layout(300, 20)
    assert layout.token_ids == (begin, *[placeholder] * 4, end)
    assert layout.embedded == ((1, 5),)
    assert vision.placeholder_id == placeholder
    assert vision.surrounding_text == ("\n\n", "\n\n")
    assert vision.bidirectional
    assert not vision.uses_mrope


def test_crops_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_vlm(tmp_path, "gemma3", image_processor={"do_pan_and_scan": True})
    with pytest.raises(UnsupportedModelError, match="do_pan_and_scan, whose crops are not served: set it to false"):
        open_tiny_vlm(folder)


@pytest.mark.parametrize("count", [8, 9])
def test_patches_that_cannot_be_averaged_are_refused(count: int, tmp_path: Path) -> None:
    folder = write_tiny_vlm(tmp_path, "gemma3", mm_tokens_per_image=count)
    with pytest.raises(UnsupportedModelError, match=f"4x4 patches can't be averaged to {count} embeddings"):
        open_tiny_vlm(folder)

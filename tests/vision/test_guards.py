"""The thumbnail guard's limits, one at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from pictures import photographs
from PIL import Image

from mlserve.vision.guards import ThumbnailGuard
from mlserve.vision.hashes import shrink
from mlserve.vision.image import load_image

GUARD = ThumbnailGuard()
GREY: npt.NDArray[np.uint8] = np.full((32, 32, 3), 100, dtype=np.uint8)


def changed(value: int, cells: int = 32 * 32, channels: slice = slice(None)) -> npt.NDArray[np.uint8]:
    thumbnail = GREY.copy()
    thumbnail.reshape(-1, 3)[:cells, channels] += np.uint8(value)
    return thumbnail


def test_features_are_a_thumbnail() -> None:
    image = load_image(photographs()["china"])
    features = GUARD.features(image, shrink(image))
    assert (features.shape, features.dtype) == ((32, 32, 3), np.uint8)
    box = np.asarray(image.to_pil().resize((32, 32), Image.Resampling.BOX)).astype(int)
    assert np.abs(features.astype(int) - box).mean() < 2


@pytest.mark.parametrize("sign", [1, -1])
def test_one_cell(sign: int) -> None:
    for value, expected in ((32, True), (33, False)):
        pair = GREY, changed(value, 1)
        assert GUARD.confirms(*pair[::sign]) is expected


def test_brightness_of_all_cells() -> None:
    assert GUARD.confirms(GREY, changed(12))
    assert not GUARD.confirms(GREY, changed(13))
    assert GUARD.confirms(changed(13), GREY) is False


@pytest.mark.parametrize("strength", [3, 6, 12])
def test_faint_colours_that_are_swapped(strength: int) -> None:
    red, blue = (changed(strength, channels=slice(channel, channel + 1)) for channel in (0, 2))
    assert not GUARD.confirms(red, blue)
    assert not GUARD.confirms(red, GREY)
    assert GUARD.confirms(red, changed(strength - 1, channels=slice(0, 1)))


def test_a_tint_that_rounding_may_cause() -> None:
    assert GUARD.confirms(GREY, changed(2, channels=slice(0, 1)))  # 2, in one of two colour differences: 2 / sqrt(2)
    assert not ThumbnailGuard(max_tint=1.4).confirms(GREY, changed(2, channels=slice(0, 1)))

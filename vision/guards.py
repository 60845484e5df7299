"""Guards: a second look at two images whose hashes are near, since hashes are often equal by chance.

A hash has 64 bits, most sees no colour, and none sees a small thing that is there in one image only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image

from mlserve.errors import ConfigError
from mlserve.vision.image import DecodedImage

__all__ = ["Guard", "ThumbnailGuard"]

_SIDE = 32


class Guard(Protocol):
    """Confirms that a new image is nearly the same as an earlier one. Threads share it."""

    def features(self, image: DecodedImage, shrunk: Image.Image) -> npt.NDArray[np.generic]:
        """What is kept of an image for later comparisons. `shrunk` is the image as 128x128 pixels."""
        ...

    def confirms(self, canonical: npt.NDArray[np.generic], new: npt.NDArray[np.generic]) -> bool:
        """Whether the image with the features `new` may be answered as the canonical one. Called under a lock."""
        ...


@dataclass(frozen=True, slots=True)
class ThumbnailGuard:
    """Compares thumbnails of 32x32 RGB pixels; all limits are inclusive.

    - Each value differs by at most `max_cell`: nothing as large as a thumbnail's pixel was added, removed or moved.
    - Values differ by at most `max_mean` on average: brightness is about the same.
    - Colour differences (red and blue less green) are alike: their distance is at most `max_tint`, or at most
      `max_tint_ratio` of their own size. This tells faint colours from swapped ones.

    Raises `ConfigError` for limits out of range.
    """

    max_cell: int = 32
    max_mean: float = 12.0
    max_tint: float = 1.5
    max_tint_ratio: float = 0.6

    def __post_init__(self) -> None:
        for name in ("max_cell", "max_mean", "max_tint", "max_tint_ratio"):
            value = getattr(self, name)
            if value < 0:
                raise ConfigError(f"{name} is {value}: give 0 or more")

    def features(self, image: DecodedImage, shrunk: Image.Image) -> npt.NDArray[np.uint8]:
        """[32, 32, 3], the thumbnail."""
        return np.asarray(shrunk.resize((_SIDE, _SIDE), Image.Resampling.BOX))

    def confirms(self, canonical: npt.NDArray[np.generic], new: npt.NDArray[np.generic]) -> bool:
        """See `Guard`."""
        first, second = canonical.astype(np.float32), new.astype(np.float32)
        differences = np.abs(first - second)
        if differences.max() > self.max_cell or differences.mean() > self.max_mean:
            return False
        first_tint, second_tint = _tint(first), _tint(second)
        distance = _size(first_tint - second_tint)
        return distance <= max(self.max_tint, self.max_tint_ratio * max(_size(first_tint), _size(second_tint)))


def _tint(thumbnail: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """[32, 32, 2]."""
    return thumbnail[..., ::2] - thumbnail[..., 1:2]


def _size(values: npt.NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean(values * values)))

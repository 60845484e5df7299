"""Perceptual hashes by the `imagehash` package: words of at most 64 bits that barely change when an image does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from types import MappingProxyType

import imagehash
import numpy as np
from PIL import Image

from mlserve.vision.image import DecodedImage

__all__ = ["DEFAULT_RADIUS", "HashKind", "hash_word", "shrink"]

SHRUNK_SIDE = 128


class HashKind(StrEnum):
    """The hashes of `imagehash` that are offered. All but the last see brightness only."""

    PHASH = "phash"  # signs of the lowest frequencies of a cosine transform
    DHASH = "dhash"  # which of two neighbours is brighter
    WHASH = "whash"  # signs of the lowest Haar wavelets
    COLORHASH = "colorhash"  # how many pixels have which hue; blind to where they are


# Largest distances that count as near. Of twenty pictures, copies at half the size or saved as JPEG of quality 30 lie
# within these, and no two different ones do, except by colorhash; `docs/images.md` has the figures.
DEFAULT_RADIUS: Mapping[HashKind, int] = MappingProxyType(
    {HashKind.PHASH: 8, HashKind.DHASH: 8, HashKind.WHASH: 6, HashKind.COLORHASH: 4}
)

_FUNCTIONS: Mapping[HashKind, Callable[[Image.Image], imagehash.ImageHash]] = MappingProxyType(
    {
        HashKind.PHASH: imagehash.phash,
        HashKind.DHASH: imagehash.dhash,
        HashKind.WHASH: imagehash.whash,
        HashKind.COLORHASH: imagehash.colorhash,
    }
)


def shrink(image: DecodedImage) -> Image.Image:
    """The image as 128x128 pixels. Hashes are of this one: `imagehash` itself resizes in 4 ms a megapixel.

    The filter is bilinear, widened to cover what each pixel stands for. With a box filter, a resized image's hash has
    three times as many bits changed, since boxes then begin elsewhere.
    """
    # First by whole factors, which is quick, then to size. 2: at least twice as many pixels as wanted in between.
    return image.to_pil().resize((SHRUNK_SIDE, SHRUNK_SIDE), Image.Resampling.BILINEAR, reducing_gap=2.0)


def hash_word(kind: HashKind, shrunk: Image.Image) -> int:
    """The hash of what `shrink` returned, its first bit the highest."""
    bits = np.asarray(_FUNCTIONS[kind](shrunk).hash, dtype=bool).ravel()
    return int.from_bytes(np.packbits(bits).tobytes(), "big") >> -len(bits) % 8

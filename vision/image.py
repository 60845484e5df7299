"""Decodes images from callers nobody knows: limits first, pixels after, always the same RGB.

Limits are checked against the file's header, so that a small file that unfolds into gigabytes is refused for the price
of reading a few bytes. `docs/images.md` lists the rules by which every kind of pixel becomes RGB.
"""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from typing import NoReturn

import numpy as np
import numpy.typing as npt
from PIL import Image
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from mlserve.errors import ConfigError, CorruptImageError, ImageError, ImageLimitError, UnsupportedImageError
from mlserve.vision.header import ImageFormat, exif_orientation, read_header
from mlserve.vision.source import ImageFetcher, ImageSource, read_source

__all__ = ["MAX_PIXELS", "DecodedImage", "ImageLimits", "load_image"]

# Pillow's own line (`PIL.Image.MAX_IMAGE_PIXELS`), above which some of its readers warn.
MAX_PIXELS = 2**30 // 12

_BACKGROUND = (255, 255, 255, 255)  # what transparent pixels are laid on
_EXIF_ORIENTATION = 0x0112
_SIXTEEN_BITS = {"I;16": "<u2", "I;16L": "<u2", "I;16B": ">u2"}
_READERS: dict[ImageFormat, type[ImageFile]] = {
    ImageFormat.BMP: BmpImageFile,
    ImageFormat.GIF: GifImageFile,
    ImageFormat.JPEG: JpegImageFile,
    ImageFormat.PNG: PngImageFile,
    ImageFormat.WEBP: WebPImageFile,
}
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What an image may have, checked before it is decoded. Raises `ConfigError` for limits out of range."""

    max_bytes: int = 20 * 2**20  # of the file
    max_pixels: int = 2**25  # 33.6 million; decoding takes 10 to 16 bytes for each
    max_aspect_ratio: float = 200.0  # longer side over shorter
    max_frames: int = 1024  # of an animation, of which the first frame is read

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_pixels", "max_aspect_ratio", "max_frames"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} is {value}: give a number from 1")
        if self.max_pixels > MAX_PIXELS:
            raise ConfigError(f"max_pixels is {self.max_pixels}: give at most {MAX_PIXELS}")

    def check_size(self, width: int, height: int, num_frames: int) -> None:
        """Raises `ImageLimitError` for an image with more than is allowed."""
        if width * height > self.max_pixels:
            raise ImageLimitError(
                f"the image has {width}x{height} = {width * height} pixels, limit {self.max_pixels}: "
                "shrink it or raise max_pixels"
            )
        if max(width, height) > self.max_aspect_ratio * min(width, height):
            raise ImageLimitError(
                f"the image is of {width}x{height} pixels, side ratio limit {self.max_aspect_ratio:g}: "
                "crop it or raise max_aspect_ratio"
            )
        if num_frames > self.max_frames:
            raise ImageLimitError(
                f"the animation has more than {self.max_frames} frames: send one frame or raise max_frames"
            )


DEFAULT_LIMITS = ImageLimits()


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DecodedImage:
    """RGB pixels that nobody changes any more. Raises `ValueError` for arrays of another shape or type."""

    pixels: npt.NDArray[np.uint8]  # [H, W, 3], C order, read-only

    def __post_init__(self) -> None:
        pixels = self.pixels
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
            raise ValueError(f"pixels are {pixels.dtype} of shape {pixels.shape}: give uint8 of [H, W, 3], not empty")
        if pixels.flags.writeable or not pixels.flags.c_contiguous:
            pixels = np.array(pixels, order="C")
            pixels.flags.writeable = False
            object.__setattr__(self, "pixels", pixels)

    @property
    def width(self) -> int:
        """W."""
        return int(self.pixels.shape[1])

    @property
    def height(self) -> int:
        """H."""
        return int(self.pixels.shape[0])

    def to_pil(self) -> Image.Image:
        """As a PIL image, mode RGB."""
        return Image.fromarray(self.pixels)

    def __repr__(self) -> str:
        return f"DecodedImage({self.width}x{self.height})"


def load_image(
    source: ImageSource,
    limits: ImageLimits = DEFAULT_LIMITS,
    *,
    allow_paths: bool = False,
    fetcher: ImageFetcher | None = None,
) -> DecodedImage:
    """Decode a PIL image, a file's bytes, a data URL, a path (if allowed) or an http(s) URL (if there is a fetcher).

    Of animations the first frame is decoded. `limits` apply to every kind of source. Blocks while it reads and decodes.
    Raises `ImageSourceError`, `ImageFetchError`, `ImageLimitError`, `UnsupportedImageError` or `CorruptImageError`.
    """
    if isinstance(source, Image.Image):
        return _from_pil(source, limits)
    return _decode(read_source(source, limits.max_bytes, allow_paths, fetcher), limits)


def _from_pil(image: Image.Image, limits: ImageLimits) -> DecodedImage:
    """The frame at which the caller's image stands; turned as its EXIF says, as `PIL.ImageOps.exif_transpose` would."""
    if not (image.width and image.height):
        raise CorruptImageError(f"the image is of {image.width}x{image.height} pixels: send one with a picture in it")
    limits.check_size(image.width, image.height, 1)
    try:
        image.load()
        return _normalise(image, image.getexif().get(_EXIF_ORIENTATION, 1))
    except ImageError:
        raise
    except Exception as error:
        _raise_corrupt("image", error)


def _decode(data: bytes, limits: ImageLimits) -> DecodedImage:
    header = read_header(data, limits.max_frames)
    limits.check_size(header.width, header.height, header.num_frames)
    try:
        image = _READERS[header.format](BytesIO(data))
        if image.size != (header.width, header.height):
            raise CorruptImageError(
                f"the {header.format} says {header.width}x{header.height} pixels and then "
                f"{image.width}x{image.height}: send an undamaged file"
            )
        image.load()
        return _normalise(image, exif_orientation(image.info.get("exif", b"")))
    except ImageError:
        raise
    except Exception as error:
        _raise_corrupt(header.format, error)


def _raise_corrupt(what: str, error: Exception) -> NoReturn:
    """Readers raise almost anything. Their messages may quote the file, so only the kind of error is told."""
    raise CorruptImageError(
        f"the {what} is damaged or cut short ({type(error).__name__}): send an undamaged file"
    ) from None


def _normalise(image: Image.Image, orientation: int) -> DecodedImage:
    rgb = _to_rgb(image)
    if orientation in _TURNS:
        rgb = rgb.transpose(_TURNS[orientation])
    return DecodedImage(np.asarray(rgb))


def _to_rgb(image: Image.Image) -> Image.Image:
    """Grey is repeated, 16 bits keep the upper 8, transparency is laid on white, colour profiles are ignored."""
    if image.mode in _SIXTEEN_BITS:
        wide = np.frombuffer(image.tobytes(), dtype=_SIXTEEN_BITS[image.mode])
        image = Image.fromarray((wide >> 8).astype(np.uint8).reshape(image.height, image.width))
    elif image.mode in ("I", "F") or image.mode.startswith("I;"):
        raise UnsupportedImageError(
            f"the image's pixels are of PIL mode {image.mode!r}, whose range isn't defined: convert it to mode L or RGB"
        )
    if image.has_transparency_data:
        if image.mode == "La":
            image = image.convert("LA")
        background = Image.new("RGBA", image.size, _BACKGROUND)
        image = Image.alpha_composite(background, image.convert("RGBA"))
    return image if image.mode == "RGB" else image.convert("RGB")

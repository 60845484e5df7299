"""What an image file says about itself, read from its bytes without decoding a pixel.

Pillow's readers of GIF and WebP allocate the canvas when they open a file, and `PIL.Image.open` tries every reader it
knows. So the format is told from the first bytes, sizes and frames are read here, and only then does one reader, of the
format that was found, see the file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from types import MappingProxyType

from mlserve.errors import CorruptImageError, ImageLimitError, UnsupportedImageError

__all__ = ["ImageFormat", "ImageHeader", "exif_orientation", "read_header"]

# A progressive JPEG has about ten scans, and each may make the decoder pass over the whole picture. 0xFFDA is stuffed
# away from coded data, so counting it counts scans, and a few more where thumbnails or other pictures are embedded.
MAX_JPEG_SCANS = 100
MAX_JPEG_SEGMENTS = 4096  # before the one with the size; a padding byte counts as one

_JPEG_SIZES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # SOF0..SOF15 without DHT, JPG and DAC
_JPEG_BARE = frozenset((0x01, *range(0xD0, 0xD9)))  # markers without a length
_EXIF_ORIENTATION = 0x0112
_EXIF_SHORT = 3


class ImageFormat(StrEnum):
    """The formats that are read."""

    BMP = "BMP"
    GIF = "GIF"
    JPEG = "JPEG"
    PNG = "PNG"
    WEBP = "WebP"


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """Size in pixels as stored, before any rotation, and the number of frames."""

    format: ImageFormat
    width: int
    height: int
    num_frames: int


def read_header(data: bytes, max_frames: int) -> ImageHeader:
    """Read an image file's header; frames are counted up to `max_frames` + 1.

    Raises `UnsupportedImageError` for other formats, `CorruptImageError` for a header that is cut short or says
    nonsense, `ImageLimitError` for a JPEG of more than 100 scans.
    """
    image_format = _format_of(data)
    try:
        width, height = _SIZES[image_format](data)
        num_frames = _FRAMES[image_format](data, max_frames + 1) if image_format in _FRAMES else 1
    except (struct.error, IndexError):
        raise CorruptImageError(f"the {image_format} header is cut short: send the whole file") from None
    if not (width and height and num_frames):
        raise CorruptImageError(
            f"the {image_format} is of {width}x{height} pixels in {num_frames} frames: send one with a picture in it"
        )
    return ImageHeader(image_format, width, height, num_frames)


def exif_orientation(exif: bytes) -> int:
    """The orientation, 1 to 8, in an EXIF block; 1 if the block doesn't say, or is damaged."""
    tiff = exif.removeprefix(b"Exif\0\0")
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None:
        return 1
    try:
        (at,) = struct.unpack_from(order + "I", tiff, 4)
        (count,) = struct.unpack_from(order + "H", tiff, at)
        for entry in range(at + 2, at + 2 + 12 * count, 12):
            tag, kind, values, value = struct.unpack_from(order + "HHIH", tiff, entry)
            if (tag, kind, values) == (_EXIF_ORIENTATION, _EXIF_SHORT, 1):
                return value if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


def _format_of(data: bytes) -> ImageFormat:
    if data.startswith(b"\xff\xd8\xff"):
        return ImageFormat.JPEG
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return ImageFormat.PNG
    if data.startswith((b"GIF87a", b"GIF89a")):
        return ImageFormat.GIF
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return ImageFormat.WEBP
    if data.startswith(b"BM"):
        return ImageFormat.BMP
    raise UnsupportedImageError(
        f"{len(data)} bytes are of no image format that is read: send one of {', '.join(ImageFormat)}"
    )


def _png_size(data: bytes) -> tuple[int, int]:
    chunk, width, height = struct.unpack_from(">4sII", data, 12)
    return (width, height) if chunk == b"IHDR" else (0, 0)


def _png_frames(data: bytes, most: int) -> int:
    """An animated PNG announces its frames in a chunk before its pixels."""
    at = 8
    while True:
        length, chunk = struct.unpack_from(">I4s", data, at)
        if chunk == b"acTL":
            return min(int(struct.unpack_from(">I", data, at + 8)[0]), most)
        if chunk in (b"IDAT", b"IEND"):
            return 1
        at += 12 + length


def _jpeg_size(data: bytes) -> tuple[int, int]:
    if data.count(b"\xff\xda") > MAX_JPEG_SCANS:
        raise ImageLimitError(f"the JPEG has more than {MAX_JPEG_SCANS} scans: save it with fewer, or not progressive")
    at = 2
    for _ in range(MAX_JPEG_SEGMENTS):
        if data[at] != 0xFF:
            raise CorruptImageError("the JPEG has no marker where one must be: send an undamaged file")
        marker = data[at + 1]
        if marker in _JPEG_SIZES:
            height, width = struct.unpack_from(">HH", data, at + 5)
            return width, height
        if marker == 0xDA:
            break
        if marker == 0xFF:  # padding
            at += 1
        elif marker in _JPEG_BARE:
            at += 2
        else:
            at += 2 + int(struct.unpack_from(">H", data, at + 2)[0])
    return 0, 0


def _bmp_size(data: bytes) -> tuple[int, int]:
    (header_size,) = struct.unpack_from("<I", data, 14)
    width, height = struct.unpack_from("<HH" if header_size == 12 else "<ii", data, 18)
    return (width, abs(height)) if width > 0 else (0, 0)  # a negative height: rows from the top


def _webp_size(data: bytes) -> tuple[int, int]:
    chunk = data[12:16]
    if chunk == b"VP8X":
        packed = struct.unpack_from("<6B", data, 24)
        return 1 + int.from_bytes(packed[:3], "little"), 1 + int.from_bytes(packed[3:], "little")
    if chunk == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if chunk == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    return 0, 0


def _webp_frames(data: bytes, most: int) -> int:
    at, num_frames = 12, 0
    while at + 8 <= len(data) and num_frames < most:
        chunk, length = struct.unpack_from("<4sI", data, at)
        num_frames += chunk in (b"ANMF", b"VP8 ", b"VP8L")
        at += 8 + length + length % 2
    return num_frames


def _gif_size(data: bytes) -> tuple[int, int]:
    """That of the screen, or of what the first frame covers if that is more."""
    width, height = struct.unpack_from("<HH", data, 6)
    left, top, frame_width, frame_height = next(_gif_extents(data), (0, 0, 0, 0))
    return max(width, left + frame_width), max(height, top + frame_height)


def _gif_frames(data: bytes, most: int) -> int:
    return sum(1 for _ in islice(_gif_extents(data), most))


def _gif_extents(data: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Left, top, width and height of each frame."""
    at = 13 + _colour_table(data[10])
    while at < len(data):
        kind = data[at]
        if kind == 0x2C:
            left, top, width, height, flags = struct.unpack_from("<HHHHB", data, at + 1)
            yield left, top, width, height
            at += 11 + _colour_table(flags)
        elif kind == 0x21:
            at += 2
        elif kind == 0x3B:
            return
        else:  # what stands between blocks is skipped, as readers do
            at += 1
            continue
        while at < len(data) and data[at]:
            at += 1 + data[at]
        at += 1


def _colour_table(flags: int) -> int:
    """Bytes of the table that the flags announce."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


_SIZES: Mapping[ImageFormat, Callable[[bytes], tuple[int, int]]] = MappingProxyType(
    {
        ImageFormat.BMP: _bmp_size,
        ImageFormat.GIF: _gif_size,
        ImageFormat.JPEG: _jpeg_size,
        ImageFormat.PNG: _png_size,
        ImageFormat.WEBP: _webp_size,
    }
)
_FRAMES: Mapping[ImageFormat, Callable[[bytes, int], int]] = MappingProxyType(
    {ImageFormat.GIF: _gif_frames, ImageFormat.PNG: _png_frames, ImageFormat.WEBP: _webp_frames}
)

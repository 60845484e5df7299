"""Pictures for tests: photographs that scikit-image and scikit-learn bring along, drawings, and files of them."""

from __future__ import annotations

import importlib.util
import struct
import zlib
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

Colour = tuple[int, int, int]

# Not all are photographs: two pages of text and a chart of cells are what near-duplicate detection finds hardest.
_SKIMAGE = """
    astronaut.png brick.png camera.png cell.png chelsea.png clock_motion.png coffee.png coins.png grass.png gravel.png
    hubble_deep_field.jpg ihc.png moon.png motorcycle_left.png page.png retina.jpg rocket.jpg text.png
""".split()
_SKLEARN = ["china.jpg", "flower.jpg"]
COLOURFUL = ("astronaut", "chelsea", "china", "coffee", "flower", "ihc", "motorcycle_left", "retina", "rocket")


@cache
def photographs() -> dict[str, Image.Image]:
    """Twenty pictures by name, RGB, of 172 to 1411 pixels a side. Don't change them."""
    paths = [_package("skimage") / "data" / name for name in _SKIMAGE]
    paths += [_package("sklearn") / "datasets" / "images" / name for name in _SKLEARN]
    return {path.stem: Image.open(path).convert("RGB") for path in paths}


def second_view() -> Image.Image:
    """The scene of `motorcycle_left`, from a few centimetres beside it."""
    return Image.open(_package("skimage") / "data" / "motorcycle_right.png").convert("RGB")


def _package(name: str) -> Path:
    """Its folder, without importing it."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def flat(colour: Colour = (200, 30, 40), size: tuple[int, int] = (64, 64)) -> Image.Image:
    """One colour."""
    return Image.new("RGB", size, colour)


def halves(left: Colour, right: Colour, size: tuple[int, int] = (64, 64)) -> Image.Image:
    """One colour left, another one right."""
    image = Image.new("RGB", size, right)
    image.paste(left, (0, 0, size[0] // 2, size[1]))
    return image


def random_picture(seed: int, size: int = 96) -> Image.Image:
    """Nothing in particular: by turns shapes, soft blobs of colour, stripes, and noise."""
    random = np.random.default_rng(seed)
    if seed % 4 == 0:
        return _shapes(random, size)
    if seed % 4 == 1:
        grid = int(random.integers(3, 12))
        blobs = Image.fromarray(random.integers(0, 256, (grid, grid, 3), dtype=np.uint8))
        return blobs.resize((size, size), Image.Resampling.BICUBIC)
    if seed % 4 == 2:
        return Image.fromarray(_stripes(random, size))
    return Image.fromarray(random.integers(0, 256, (size, size, 3), dtype=np.uint8))


def _shapes(random: np.random.Generator, size: int) -> Image.Image:
    image = Image.new("RGB", (size, size), tuple(int(value) for value in random.integers(0, 256, 3)))
    draw = ImageDraw.Draw(image)
    for _ in range(int(random.integers(3, 12))):
        x, y = (int(value) for value in random.integers(0, size, 2))
        width, height = (int(value) for value in random.integers(size // 8, size // 2, 2))
        colour = tuple(int(value) for value in random.integers(0, 256, 3))
        shape = draw.ellipse if random.random() < 0.5 else draw.rectangle
        shape((x, y, x + width, y + height), fill=colour)
    return image


def _stripes(random: np.random.Generator, size: int) -> npt.NDArray[np.uint8]:
    across, down = np.meshgrid(np.linspace(0, 1, size), np.linspace(0, 1, size))
    frequencies = random.uniform(-6, 6, (3, 2))
    phases = random.uniform(0, 2 * np.pi, 3)
    waves = [np.sin(2 * np.pi * (f[0] * across + f[1] * down) + p) for f, p in zip(frequencies, phases, strict=True)]
    return np.uint8(127.5 + 127.5 * np.stack(waves, -1))


def encode(image: Image.Image, image_format: str = "PNG", **options: Any) -> bytes:
    """The bytes of a file."""
    file = BytesIO()
    image.save(file, image_format, **options)
    return file.getvalue()


def png_of(width: int, height: int, bits: int, colour_type: int) -> bytes:
    """A PNG of zeros, made without holding its pixels: colour type 0 is grey, 2 RGB."""
    row = b"\0" * (1 + (width * bits * (3 if colour_type == 2 else 1) + 7) // 8)
    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    head = struct.pack(">IIBBBBB", width, height, bits, colour_type, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", head) + png_chunk(b"IDAT", rows) + png_chunk(b"IEND", b"")


def png_chunk(kind: bytes, data: bytes) -> bytes:
    """Length, kind, data, checksum."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def exif(orientation: int, order: str = "<") -> bytes:
    """An EXIF block that says nothing else."""
    start = b"II*\0" if order == "<" else b"MM\0*"
    return b"Exif\0\0" + start + struct.pack(order + "IHHHIHHI", 8, 1, 0x0112, 3, 1, orientation, 0, 0)

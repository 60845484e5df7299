"""Decoding: what becomes of every kind of pixel, and what is refused before one is decoded."""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import struct
import tracemalloc
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from pictures import encode, exif, flat, halves, photographs, png_chunk, png_of
from PIL import Image, ImageOps

from mlserve import (
    ConfigError,
    CorruptImageError,
    ImageError,
    ImageLimitError,
    ImageSourceError,
    UnsupportedImageError,
)
from mlserve.vision.header import ImageFormat, exif_orientation, read_header
from mlserve.vision.image import MAX_PIXELS, DecodedImage, ImageLimits, load_image

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)
LOSSLESS = ("PNG", "BMP", "GIF", "WEBP")


def same(image: DecodedImage, expected: Image.Image) -> bool:
    return np.array_equal(image.pixels, np.asarray(expected.convert("RGB")))


@pytest.mark.parametrize("image_format", LOSSLESS)
def test_lossless_formats(image_format: str) -> None:
    picture = halves(RED, BLUE, (30, 20))
    image = load_image(encode(picture, image_format, **({"lossless": True} if image_format == "WEBP" else {})))
    assert (image.width, image.height) == (30, 20)
    assert same(image, picture)


def test_jpeg_is_what_pillow_decodes() -> None:
    data = encode(photographs()["china"], "JPEG", quality=80)
    assert same(load_image(data), Image.open(BytesIO(data)))


def test_every_kind_of_source_gives_the_same_pixels(tmp_path: Path) -> None:
    picture = photographs()["chelsea"]
    data = encode(picture)
    path = tmp_path / "no suffix"
    path.write_bytes(data)
    url = "data:image/jpeg;base64," + base64.b64encode(data).decode()  # the bytes decide, not what a client says
    for source in (picture, data, bytearray(data), memoryview(data), url, url.replace("data:", "DATA:")):
        assert same(load_image(source), picture)
    for named in (path, str(path)):
        assert same(load_image(named, allow_paths=True), picture)


def test_pixels_cannot_be_changed() -> None:
    own = np.zeros((2, 3, 3), dtype=np.uint8)
    image = DecodedImage(own)
    own[:] = 9
    assert image.pixels.sum() == 0
    for each in (image, load_image(flat())):
        with pytest.raises(ValueError, match="read-only"):
            each.pixels[0, 0, 0] = 1


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4), (0, 3, 3)])
def test_arrays_that_are_no_rgb_image(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="give uint8 of"):
        DecodedImage(np.zeros(shape, dtype=np.uint8))


def test_repr_shows_no_pixels() -> None:
    assert repr(load_image(flat(size=(5, 4)))) == "DecodedImage(5x4)"


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("order", "<>")
def test_exif_orientation(orientation: int, image_format: str, order: str) -> None:
    picture = photographs()["chelsea"].resize((24, 16))
    options = {"lossless": True} if image_format == "WEBP" else {}
    data = encode(picture, image_format, exif=exif(orientation, order), **options)
    assert same(load_image(data), ImageOps.exif_transpose(Image.open(BytesIO(data))))
    assert same(load_image(Image.open(BytesIO(data))), ImageOps.exif_transpose(Image.open(BytesIO(data))))


@pytest.mark.parametrize(
    "block",
    [
        b"",
        b"Exif\0\0",
        b"Exif\0\0garbage",
        exif(6)[:-13],
        exif(9),
        exif(0),
        b"II*\0\xff\xff\xff\xff",
        exif(6).replace(struct.pack("<HHI", 0x0112, 3, 1), struct.pack("<HHI", 0x0112, 4, 1)),
    ],
    ids=["none", "empty", "garbage", "cut", "nine", "zero", "far", "wrong type"],
)
def test_exif_that_says_nothing_turns_nothing(block: bytes) -> None:
    assert exif_orientation(block) == 1
    assert exif_orientation(exif(6)) == 6


def test_transparency_is_laid_on_white() -> None:
    image = Image.new("RGBA", (4, 1), (255, 0, 0, 255))
    image.putpixel((1, 0), (255, 0, 0, 0))
    image.putpixel((2, 0), (0, 0, 0, 128))
    expected = [RED, WHITE, (127, 127, 127), RED]
    assert load_image(image).pixels[0].tolist() == [list(colour) for colour in expected]
    assert load_image(encode(image)).pixels[0].tolist() == [list(colour) for colour in expected]
    assert load_image(Image.new("LA", (1, 1), (10, 0))).pixels.tolist() == [[[255] * 3]]
    assert load_image(Image.new("La", (1, 1), (0, 0))).pixels.tolist() == [[[255] * 3]]


def test_transparent_palettes_and_single_transparent_colours() -> None:
    palette = Image.new("P", (2, 1))
    palette.putpalette([*RED, *BLUE])
    palette.putpixel((1, 0), 1)
    assert load_image(palette).pixels[0].tolist() == [list(RED), list(BLUE)]
    for image_format in ("PNG", "GIF"):
        data = encode(palette, image_format, transparency=1)
        assert load_image(data).pixels[0].tolist() == [list(RED), list(WHITE)]
    grey = Image.fromarray(np.array([[7, 9]], dtype=np.uint8))
    assert load_image(encode(grey, transparency=7)).pixels[0].tolist() == [[255] * 3, [9] * 3]
    colours = halves(RED, BLUE, (2, 1))
    assert load_image(encode(colours, transparency=BLUE)).pixels[0].tolist() == [list(RED), list(WHITE)]


def test_grey_bits_and_sixteen_bits() -> None:
    grey = Image.fromarray(np.array([[0, 1, 254]], dtype=np.uint8))
    assert load_image(encode(grey)).pixels[0].tolist() == [[0] * 3, [1] * 3, [254] * 3]
    bits = Image.new("1", (2, 1))
    bits.putpixel((1, 0), 1)
    assert load_image(encode(bits)).pixels[0].tolist() == [[0] * 3, [255] * 3]
    wide = np.array([[0, 255, 256, 0x7FFF, 0xFFFF]], dtype=np.uint16)
    for image in (Image.fromarray(wide), Image.fromarray(wide.astype(">u2"))):
        assert load_image(image).pixels[0, :, 0].tolist() == [0, 0, 1, 127, 255]
    assert load_image(encode(Image.fromarray(wide))).pixels[0, :, 0].tolist() == [0, 0, 1, 127, 255]


def test_sixteen_bit_colours_keep_the_upper_eight() -> None:
    rows = b"\0" + struct.pack(">3H", 0x12FF, 0x00FF, 0xFF00)
    head = struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0)
    body = png_chunk(b"IDAT", zlib.compress(rows))
    data = b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", head) + body + png_chunk(b"IEND", b"")
    assert load_image(data).pixels.tolist() == [[[0x12, 0x00, 0xFF]]]


def test_cmyk_and_other_colour_spaces() -> None:
    cmyk = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    assert load_image(cmyk).pixels[0, 0].tolist() == list(RED)
    assert np.abs(load_image(encode(cmyk, "JPEG", quality=100)).pixels[0, 0].astype(int) - RED).max() <= 3
    assert load_image(Image.new("HSV", (1, 1), (0, 255, 255))).pixels[0, 0].tolist() == list(RED)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_without_a_range_are_refused(mode: str) -> None:
    with pytest.raises(UnsupportedImageError, match=f"mode '{mode}'"):
        load_image(Image.new(mode, (2, 2)))


def test_colour_profiles_are_ignored() -> None:
    from PIL import ImageCms

    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("XYZ")).tobytes()
    picture = photographs()["coffee"]
    assert same(load_image(encode(picture, icc_profile=profile)), picture)


@pytest.mark.parametrize("image_format", ["GIF", "PNG", "WEBP"])
def test_first_frame_of_animations(image_format: str) -> None:
    frames = [flat(RED, (8, 8)), flat(BLUE, (8, 8)), flat(WHITE, (8, 8))]
    data = encode(frames[0], image_format, save_all=True, append_images=frames[1:], lossless=True)
    assert read_header(data, 10).num_frames == 3
    assert load_image(data, ImageLimits(max_frames=3)).pixels[0, 0].tolist() == list(RED)
    with pytest.raises(ImageLimitError, match="more than 2 frames: send one frame or raise max_frames"):
        load_image(data, ImageLimits(max_frames=2))


def test_a_callers_animation_is_taken_where_it_stands() -> None:
    data = encode(flat(RED, (8, 8)), "GIF", save_all=True, append_images=[flat(BLUE, (8, 8))])
    image = Image.open(BytesIO(data))
    image.seek(1)
    assert load_image(image).pixels[0, 0].tolist() == list(BLUE)
    assert image.tell() == 1


@pytest.mark.parametrize("image_format", ["PNG", "BMP", "GIF", "WEBP", "JPEG"])
def test_headers(image_format: str) -> None:
    data = encode(flat(size=(300, 17)), image_format)
    header = read_header(data, 5)
    assert (header.format.upper(), header.width, header.height, header.num_frames) == (image_format, 300, 17, 1)


@pytest.mark.parametrize("image_format", ["PNG", "BMP", "GIF", "WEBP", "JPEG"])
def test_files_that_are_cut_short_are_refused(image_format: str) -> None:
    data = encode(photographs()["chelsea"], image_format)
    for length in (12, 20, 40, 200, len(data) // 2, len(data) - 40):
        with pytest.raises(CorruptImageError) as raised:
            load_image(data[:length])
        assert str(raised.value).startswith("the ")
        assert raised.value.__context__ is None or raised.value.__suppress_context__


@pytest.mark.parametrize("image_format", ["PNG", "BMP", "GIF", "WEBP", "JPEG"])
def test_damaged_files_raise_no_other_errors(image_format: str) -> None:
    data = bytearray(encode(photographs()["chelsea"].resize((40, 30)), image_format))
    random = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(data)
        for at in random.integers(0, min(len(data), 120) if random.random() < 0.7 else len(data), 3):
            damaged[at] = random.integers(0, 256)
        with contextlib.suppress(ImageError):  # what is left may still be an image
            load_image(bytes(damaged))


@pytest.mark.parametrize(
    "data",
    [b"", b"GIF", b"%PDF-1.7", b"II*\0" + b"\0" * 40, b"RIFF\0\0\0\0WAVE", b"<svg/>", b"%!PS-Adobe-3.0 EPSF-3.0\n"],
)
def test_other_formats_are_refused(data: bytes) -> None:
    with pytest.raises(UnsupportedImageError, match="send one of BMP, GIF, JPEG, PNG, WebP"):
        load_image(data)


def test_a_file_is_read_by_the_reader_of_its_first_bytes_only() -> None:
    """A GIF that is a JPEG further on, and the reverse, are what they begin as, or nothing."""
    gif, jpeg = encode(flat(RED, (8, 8)), "GIF"), encode(flat(BLUE, (8, 8)), "JPEG")
    assert load_image(gif + jpeg).pixels[0, 0].tolist() == list(RED)
    with pytest.raises(CorruptImageError):
        load_image(b"\xff\xd8\xff" + gif)
    assert read_header(jpeg + gif, 5).format is ImageFormat.JPEG


def peak_bytes(data: bytes, error: type[ImageError], match: str) -> int:
    tracemalloc.start()
    with pytest.raises(error, match=match):
        load_image(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_bombs_are_refused_by_their_header() -> None:
    for data in (png_of(12_000, 12_000, 1, 0), png_of(13_000, 13_000, 8, 2)):
        assert peak_bytes(data, ImageLimitError, r"pixels, limit 33554432: shrink it or raise max_pixels") < 2**20


@pytest.mark.parametrize("disposal", [0, 2, 3])
def test_gif_canvases_are_not_allocated(disposal: int) -> None:
    """Pillow would, as soon as it opens the file: for the screen, and for a first frame that is larger."""
    control = b"!\xf9\x04" + bytes([disposal << 2]) + b"\0\0\0\0"
    for screen, frame in (((60_000, 60_000), (1, 1)), ((1, 1), (60_000, 60_000))):
        data = b"GIF89a" + struct.pack("<HHBBB", *screen, 0, 0, 0) + control
        data += b"," + struct.pack("<HHHHB", 0, 0, *frame, 0) + b"\x02\x02\x44\x01\0;"
        assert peak_bytes(data, ImageLimitError, "60000x60000") < 2**20


@pytest.mark.parametrize("chunk", [b"VP8X", b"VP8L", b"VP8 "])
def test_webp_canvases_are_not_allocated(chunk: bytes) -> None:
    side = 16_383
    body = {
        b"VP8X": struct.pack("<I", 0) + (side - 1).to_bytes(3, "little") * 2,
        b"VP8L": b"\x2f" + struct.pack("<I", (side - 1) | (side - 1) << 14) + b"\0" * 5,
        b"VP8 ": b"\0\0\0\x9d\x01\x2a" + struct.pack("<HH", side, side),
    }[chunk]
    data = b"RIFF\0\0\0\0WEBP" + chunk + struct.pack("<I", len(body)) + body
    data += b"VP8L" + struct.pack("<I", 0)
    assert peak_bytes(data, ImageLimitError, f"{side}x{side}") < 2**20


def test_limits_are_inclusive() -> None:
    data = encode(flat(size=(200, 2)))
    exact = ImageLimits(max_bytes=len(data), max_pixels=400, max_aspect_ratio=100, max_frames=1)
    assert load_image(data, exact).width == 200
    with pytest.raises(ImageLimitError, match=f"the image has {len(data)} bytes, limit {len(data) - 1}: shrink it"):
        load_image(data, ImageLimits(max_bytes=len(data) - 1))
    for source in (data, flat(size=(200, 2))):
        with pytest.raises(ImageLimitError, match="has 200x2 = 400 pixels, limit 399: shrink it or raise max_pixels"):
            load_image(source, ImageLimits(max_pixels=399))
        with pytest.raises(ImageLimitError, match="200x2 pixels, side ratio limit 99: crop it"):
            load_image(source, ImageLimits(max_aspect_ratio=99))


@pytest.mark.parametrize("name", ["max_bytes", "max_pixels", "max_aspect_ratio", "max_frames"])
def test_limits_out_of_range(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 0: give a number from 1"):
        ImageLimits(**{name: 0})
    with pytest.raises(ConfigError, match=f"give at most {MAX_PIXELS}"):
        ImageLimits(max_pixels=MAX_PIXELS + 1)


def test_pillow_has_the_same_line() -> None:
    assert Image.MAX_IMAGE_PIXELS == MAX_PIXELS


def test_a_jpeg_of_many_scans_is_refused() -> None:
    data = encode(flat(size=(8, 8)), "JPEG", progressive=True)
    assert load_image(data).width == 8
    scan = data[data.rindex(b"\xff\xda") : -2]
    with pytest.raises(ImageLimitError, match="more than 100 scans"):
        load_image(data[:-2] + scan * 100 + data[-2:])


def test_a_jpeg_whose_header_goes_on_for_ever_is_refused() -> None:
    for filler in (b"\xff", b"\xff\xe0\0\2"):
        with pytest.raises(CorruptImageError):
            load_image(b"\xff\xd8" + filler * 5000 + encode(flat(), "JPEG")[2:])


def test_a_jpeg_of_two_sizes_is_refused() -> None:
    """Limits hold for the first, and Pillow would take the last."""
    data = encode(flat(size=(8, 8)), "JPEG")
    start = data.index(b"\xff\xc0")
    end = start + 2 + int.from_bytes(data[start + 2 : start + 4], "big")
    larger = data[start : start + 5] + struct.pack(">HH", 9000, 9000) + data[start + 9 : end]
    with pytest.raises(CorruptImageError, match="says 8x8 pixels and then 9000x9000: send an undamaged file"):
        load_image(data[:end] + larger + data[end:])


def test_data_urls_that_are_damaged() -> None:
    payload = base64.b64encode(encode(flat())).decode()
    for url in (f"data:image/png,{payload}", "data:image/png;base64", f"data:{payload}"):
        with pytest.raises(ImageSourceError, match="isn't in base64: write it as"):
            load_image(url)
    for damaged in (payload[:-1], payload[:9] + " " + payload[9:], payload[:9] + "é" + payload[9:], "-_" + payload):
        with pytest.raises(ImageSourceError, match="base64 is damaged or cut short") as raised:
            load_image(f"data:;base64,{damaged}")
        assert payload[:8] not in str(raised.value)


def test_data_urls_are_measured_before_they_are_decoded() -> None:
    data = encode(flat())
    url = "data:;base64," + base64.b64encode(data).decode()
    assert load_image(url, ImageLimits(max_bytes=len(data))).width == 64
    with pytest.raises(ImageLimitError, match=f"{len(data)} bytes, limit {len(data) - 1}"):
        load_image(url, ImageLimits(max_bytes=len(data) - 1))


def test_paths_and_urls_are_refused_unless_allowed(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encode(flat()))
    bare = base64.b64encode(path.read_bytes()).decode()
    for source in (path, str(path), f"file://{path}", "ftp://host/a.png", bare):
        with pytest.raises(ImageSourceError, match="paths aren't read here: send its bytes") as raised:
            load_image(source)
        assert bare not in str(raised.value)
    for url in ("http://host/a.png", "HTTPS://host/a.png"):
        with pytest.raises(ImageSourceError, match="none are fetched here: send its bytes"):
            load_image(url, allow_paths=True)
    with pytest.raises(ImageSourceError, match="a int is no image"):
        load_image(3)  # type: ignore[arg-type]


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "none", tmp_path / "pipe", Path("/dev/zero"), "a\0b", "x" * 5000):
        with pytest.raises(ImageSourceError, match="check the path"):
            load_image(path, allow_paths=True)
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ImageLimitError, match=f"has {2**40} bytes, limit 1000"):
        load_image(large, ImageLimits(max_bytes=1000), allow_paths=True)


def test_nothing_of_an_image_is_logged_or_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "mlserve")
    data = encode(photographs()["chelsea"])
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    load_image(url)
    with pytest.raises(CorruptImageError) as raised:
        load_image(url[: 22 + len(url) // 8 * 4])
    assert caplog.records == []
    assert len(str(raised.value)) < 200

"""The digest of an image, and identity by equal pixels."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
from pictures import encode, exif, flat, photographs
from PIL import Image

from mlserve import ConfigError
from mlserve.vision.identity import ExactIdentity, PerceptualIdentity, get_image_identity
from mlserve.vision.image import DecodedImage, load_image
from mlserve.vision.match import image_digest


def zeros(width: int, height: int) -> DecodedImage:
    return DecodedImage(np.zeros((height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("size", [(1, 1), (5, 7), (500, 400)], ids=str)
def test_digest_is_as_documented(size: tuple[int, int]) -> None:
    """Small and large images, of which the latter are hashed by two threads, by the same formula."""
    image = load_image(photographs()["chelsea"].resize(size))
    data = image.pixels.tobytes()
    halves = [hashlib.sha256(part).digest() for part in (data[: len(data) // 2], data[len(data) // 2 :])]
    head = b"mlserve image, version 1" + struct.pack("<QQ", *size)
    assert image_digest(image) == hashlib.sha256(head + b"".join(halves)).digest()


def test_every_byte_counts() -> None:
    pixels = np.zeros((3, 2, 3), dtype=np.uint8)
    digests = {image_digest(DecodedImage(pixels))}
    for at in range(pixels.size):
        changed = pixels.copy()
        changed.flat[at] = 1
        digests.add(image_digest(DecodedImage(changed)))
    assert len(digests) == 1 + pixels.size
    assert {len(digest) for digest in digests} == {32}


def test_size_counts() -> None:
    assert len({image_digest(zeros(*size)) for size in ((1, 12), (12, 1), (3, 4), (4, 3), (2, 6), (6, 2))}) == 6


def test_the_file_does_not_count() -> None:
    picture = photographs()["coffee"]
    files = [encode(picture), encode(picture, "BMP"), encode(picture, compress_level=1), encode(picture, exif=exif(1))]
    assert len({image_digest(load_image(source)) for source in (picture, *files)}) == 1
    assert image_digest(load_image(encode(picture, exif=exif(3)))) != image_digest(load_image(picture))
    assert image_digest(load_image(encode(picture, "JPEG"))) != image_digest(load_image(picture))


def test_exact_identity() -> None:
    identity = ExactIdentity()
    image = load_image(photographs()["coffee"])
    match = identity.identify(image, b"one tenant")
    assert match == identity.identify(load_image(encode(image.to_pil())), b"another")
    assert (match.digest, match.own_digest) == (image_digest(image),) * 2
    assert (match.width, match.height, match.hash_name, match.distance) == (image.width, image.height, None, None)
    assert not match.is_near
    identity.forget(match.digest)
    assert identity.identify(image) == match


def test_identities_by_name() -> None:
    assert isinstance(get_image_identity("exact"), ExactIdentity)
    for name, hash_name in (("perceptual", "phash"), ("dhash", "dhash"), ("phash+colorhash", "phash+colorhash")):
        identity = get_image_identity(name)
        assert isinstance(identity, PerceptualIdentity)
        assert (identity.name, identity.hash_name) == ("perceptual", hash_name)
    assert get_image_identity("phash+dhash", 3).radii == (3, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ahash",), "image_identity is 'ahash': give one of exact, perceptual, phash"),
        (("phash+phash",), "hashes are phash[+]phash: give one or more, each once"),
        (("exact", 3), "image_radius and image_clip are for images that look alike"),
        (("phash", 40), "radius is 40: give 0 to 16 bits"),
        (("phash", None, "nowhere"), "image_clip is 'nowhere', which has no open_clip_model.safetensors"),
    ],
)
def test_wrong_identities_are_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        get_image_identity(*arguments)


def test_flat_pictures_differ_by_colour() -> None:
    colours = [(255, 0, 0), (0, 0, 255), (255, 255, 255), (254, 0, 0)]
    assert len({image_digest(load_image(flat(colour))) for colour in colours}) == 4
    assert image_digest(load_image(Image.new("L", (4, 4), 7))) == image_digest(load_image(flat((7, 7, 7), (4, 4))))

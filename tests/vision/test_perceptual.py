"""Identity by likeness: what matches, what never does, within which scope, and for how long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import imagehash
import numpy as np
import numpy.typing as npt
import pytest
from pictures import COLOURFUL, encode, flat, halves, photographs, random_picture, second_view
from PIL import Image, ImageDraw, ImageEnhance, ImageOps

from mlserve import ConfigError
from mlserve.vision.guards import ThumbnailGuard
from mlserve.vision.hashes import HashKind, hash_word, shrink
from mlserve.vision.image import DecodedImage, load_image
from mlserve.vision.match import image_digest
from mlserve.vision.perceptual import PerceptualIdentity

PHOTOGRAPHS = sorted(photographs())


def photograph(name: str) -> DecodedImage:
    return load_image(photographs()[name])


def jpeg(name: str, quality: int) -> DecodedImage:
    return load_image(encode(photographs()[name], "JPEG", quality=quality))


def swapped(image: Image.Image) -> Image.Image:
    return Image.merge("RGB", image.split()[::-1])


def cropped(image: Image.Image, percent: int) -> Image.Image:
    across, down = (round(side * percent / 200) for side in image.size)
    return image.crop((across, down, image.width - across, image.height - down))


def matches(first: Image.Image, second: Image.Image, **options: Any) -> bool:
    identity = PerceptualIdentity(**options)
    identity.identify(load_image(first))
    return identity.identify(load_image(second)).is_near


@pytest.mark.parametrize("kind", list(HashKind))
def test_words_are_the_hashes_of_imagehash(kind: HashKind) -> None:
    shrunk = shrink(photograph("astronaut"))
    expected = getattr(imagehash, kind)(shrunk)
    assert f"{hash_word(kind, shrunk):0{len(str(expected))}x}" == str(expected)


@pytest.mark.parametrize("name", PHOTOGRAPHS)
def test_shrinking_first_moves_few_bits(name: str) -> None:
    whole = imagehash.phash(photographs()[name])
    assert whole - imagehash.phash(shrink(photograph(name))) <= 8


def test_a_near_duplicate_becomes_its_canonical_image() -> None:
    identity = PerceptualIdentity()
    first, second = photograph("china"), jpeg("china", 70)
    own = identity.identify(first)
    assert (own.digest, own.is_near, own.hash_name, own.distance) == (image_digest(first), False, None, None)
    match = identity.identify(second)
    assert match.is_near
    assert (match.digest, match.own_digest) == (image_digest(first), image_digest(second))
    assert (match.width, match.height, match.hash_name) == (first.width, first.height, "phash")
    assert match.distance == imagehash.phash(shrink(first)) - imagehash.phash(shrink(second))
    assert identity.identify(first) == own
    assert len(identity) == 1


def test_the_canonical_image_gives_the_size() -> None:
    identity = PerceptualIdentity()
    large = photograph("chelsea")
    identity.identify(large)
    small = load_image(photographs()["chelsea"].resize((large.width // 3, large.height // 3), Image.Resampling.BOX))
    match = identity.identify(small)
    assert match.is_near
    assert (match.width, match.height) == (large.width, large.height)


@pytest.mark.parametrize("name", PHOTOGRAPHS)
def test_mirrored_pictures_never_match(name: str) -> None:
    image = photographs()[name]
    for turned in (ImageOps.mirror(image), ImageOps.flip(image), image.transpose(Image.Transpose.ROTATE_180)):
        assert not matches(image, turned, radius=16)


@pytest.mark.parametrize("name", COLOURFUL)
@pytest.mark.parametrize("hashes", ["phash", "dhash", "whash", "colorhash"])
def test_colour_swapped_and_grey_pictures_never_match(name: str, hashes: str) -> None:
    image = photographs()[name]
    red, green, blue = image.split()
    for bands in ((blue, green, red), (green, red, blue), (red, blue, green), (green, blue, red)):
        assert not matches(image, Image.merge("RGB", bands), hashes=hashes, radius=16)
    assert not matches(image, image.convert("L"), hashes=hashes, radius=16)


@pytest.mark.parametrize("hashes", ["phash", "dhash", "whash", "colorhash"])
def test_pictures_without_structure_never_match(hashes: str) -> None:
    """For these, hashes of what is bright and dark are all equal."""
    noise = np.random.default_rng(0).integers(118, 138, (2, 64, 64, 3), dtype=np.uint8)
    pictures = [flat((255, 0, 0)), flat((254, 0, 0)), flat((0, 0, 255)), flat((255, 255, 255)), flat((0, 0, 0))]
    pictures += [halves((200, 0, 0), (0, 102, 0)), halves((0, 102, 0), (200, 0, 0)), flat((9, 9, 9), (1, 1))]
    pictures += [Image.fromarray(each) for each in noise]
    identity = PerceptualIdentity(hashes, radius=16, guards=[ThumbnailGuard(255, 255, 255, 255)])
    assert not any(identity.identify(load_image(picture)).is_near for picture in pictures)
    assert len(identity) == 0


def test_small_pictures_never_match() -> None:
    image = photographs()["china"]
    for side, expected in ((31, False), (32, True)):
        first = image.resize((side, side), Image.Resampling.BOX)
        assert matches(first, ImageEnhance.Brightness(first).enhance(1.02)) is expected


@pytest.mark.parametrize("name", PHOTOGRAPHS)
@pytest.mark.parametrize(
    "transform",
    [
        lambda image: image.resize((image.width // 2, image.height // 2), Image.Resampling.BICUBIC),
        lambda image: load_image(encode(image, "JPEG", quality=50)).to_pil(),
        lambda image: ImageEnhance.Contrast(image).enhance(1.05),
    ],
    ids=["half", "jpeg", "contrast"],
)
def test_slight_changes_match(name: str, transform: Callable[[Image.Image], Image.Image]) -> None:
    assert matches(photographs()[name], transform(photographs()[name]))


@pytest.mark.parametrize("name", PHOTOGRAPHS)
def test_something_added_does_not_match(name: str) -> None:
    """A red ball of a twentieth of the shorter side."""
    image = photographs()[name].copy()
    radius = min(image.size) / 40
    centre = (image.width * 0.6, image.height * 0.4)
    ball = (centre[0] - radius, centre[1] - radius, centre[0] + radius, centre[1] + radius)
    ImageDraw.Draw(image).ellipse(ball, fill=(230, 20, 20))
    assert not matches(photographs()[name], image)


def test_crops_stretched_copies_and_other_views_do_not_match() -> None:
    image = photographs()["motorcycle_left"]
    assert not matches(image, second_view())
    assert not matches(image, cropped(image, 10))
    assert not matches(image, image.resize((image.width, image.height * 9 // 10)))
    page = photographs()["page"].copy()
    page.paste(page.crop((20, 20, 60, 34)), (150, 100))
    assert not matches(photographs()["page"], page)


def test_a_much_smaller_picture_does_not_stand_for_a_larger_one() -> None:
    image = photographs()["coffee"]
    half = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    third = image.resize((image.width // 3, image.height // 3), Image.Resampling.BOX)
    assert matches(half, image)
    assert not matches(third, image)
    assert matches(image, third)


@pytest.mark.parametrize("hashes", ["phash", "dhash", "whash", "colorhash", "phash+dhash+whash+colorhash"])
def test_different_photographs_do_not_match(hashes: str) -> None:
    identity = PerceptualIdentity(hashes, radius=16)
    assert not any(identity.identify(photograph(name)).is_near for name in PHOTOGRAPHS)
    assert len(identity) == len(PHOTOGRAPHS)


def count_matches(pictures: int) -> int:
    identity = PerceptualIdentity()
    return sum(identity.identify(load_image(random_picture(seed))).is_near for seed in range(pictures))


def test_unrelated_pictures_do_not_match() -> None:
    assert count_matches(400) == 0


@pytest.mark.slow
def test_ten_thousand_unrelated_pictures_do_not_match() -> None:
    assert count_matches(10_000) == 0


def test_scopes_never_meet() -> None:
    identity = PerceptualIdentity()
    first, second = photograph("china"), jpeg("china", 70)
    for scope in (b"one", b"two", b"", None):
        assert not identity.identify(first if scope == b"one" else second, scope).is_near
    assert identity.identify(second, b"one").is_near
    assert identity.identify(first, b"two").digest == image_digest(second)
    assert len(identity) == 4


def test_the_nearest_is_taken() -> None:
    """Two images that don't match each other, and one between them that is nearer to the second."""
    first = photographs()["chelsea"]
    second = ImageEnhance.Brightness(first).enhance(1.25)
    between = ImageEnhance.Brightness(first).enhance(1.18)
    identity = PerceptualIdentity(guards=[ThumbnailGuard(max_cell=50, max_mean=25)])
    identity.identify(load_image(second))
    assert not matches(first, second)
    assert identity.identify(load_image(between)).digest == image_digest(load_image(second))
    recorded: list[float] = []

    class Recording(ThumbnailGuard):
        def confirms(self, canonical: npt.NDArray[np.generic], new: npt.NDArray[np.generic]) -> bool:
            recorded.append(float(canonical.mean()))
            return False

    identity = PerceptualIdentity(radius=16, guards=[Recording()])
    images = [load_image(image) for image in (cropped(first, 5), cropped(first, 2), first)]
    for image in images:
        identity.identify(image)
    identity.identify(jpeg("chelsea", 60))
    distances = [imagehash.phash(shrink(image)) - imagehash.phash(shrink(jpeg("chelsea", 60))) for image in images]
    assert distances == sorted(distances, reverse=True)
    assert len(set(distances)) == 3
    means = [float(ThumbnailGuard().features(image, shrink(image)).mean()) for image in images]
    assert recorded[-3:] == means[::-1]


def test_all_hashes_must_be_near() -> None:
    image, copy = photograph("page"), jpeg("page", 20)
    distances = [
        (imagehash.phash(shrink(image)) - imagehash.phash(shrink(copy))),
        (imagehash.dhash(shrink(image)) - imagehash.dhash(shrink(copy))),
    ]
    identity = PerceptualIdentity("phash+dhash", radius=max(distances))
    identity.identify(image)
    match = identity.identify(copy)
    assert (match.hash_name, match.distance) == ("phash+dhash", sum(distances))
    assert max(distances) > 0
    assert not matches(image.to_pil(), copy.to_pil(), hashes="phash+dhash", radius=max(distances) - 1)


def test_every_guard_must_agree() -> None:
    class Refusing(ThumbnailGuard):
        def confirms(self, canonical: npt.NDArray[np.generic], new: npt.NDArray[np.generic]) -> bool:
            return False

    pair = photographs()["china"], jpeg("china", 70).to_pil()
    assert matches(*pair, guards=[ThumbnailGuard(), ThumbnailGuard()])
    assert not matches(*pair, guards=[ThumbnailGuard(), Refusing()])


def test_a_forgotten_image_matches_nothing() -> None:
    identity = PerceptualIdentity()
    first, second = photograph("china"), jpeg("china", 70)
    digest = identity.identify(first, b"a").digest
    identity.forget(digest)  # unknown in that scope
    identity.forget(image_digest(second), b"a")
    assert identity.identify(second, b"a").digest == digest
    identity.forget(digest, b"a")
    assert len(identity) == 0
    assert identity.identify(second, b"a").digest == image_digest(second)
    assert identity.identify(first, b"a").digest == image_digest(second)


def test_the_least_recently_used_is_forgotten() -> None:
    identity = PerceptualIdentity(max_entries=3)
    names = ["astronaut", "chelsea", "coffee", "flower"]
    for name in names[:3]:
        identity.identify(photograph(name), name.encode() if name == "chelsea" else None)
    identity.identify(photograph("astronaut"))  # the image itself
    identity.identify(jpeg("chelsea", 70), b"chelsea")  # one like it
    identity.identify(photograph("flower"))  # coffee's turn to go
    assert len(identity) == 3
    assert identity.identify(jpeg("astronaut", 70)).is_near
    assert identity.identify(jpeg("chelsea", 70), b"chelsea").is_near
    assert not identity.identify(jpeg("coffee", 70)).is_near


def test_threads_agree_on_one_canonical_image() -> None:
    identity = PerceptualIdentity()
    copies = [jpeg("china", quality) for quality in range(60, 92, 4)]
    start = threading.Barrier(len(copies))
    digests = []

    def work(copy: DecodedImage) -> None:
        start.wait(10)
        for _ in range(5):
            digests.append(identity.identify(copy).digest)

    threads = [threading.Thread(target=work, args=(copy,)) for copy in copies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(digests) == 5 * len(copies)
    assert len(set(digests)) == 1
    assert len(identity) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hashes": "ahash"}, "there is no hash 'ahash': give one or more of phash, dhash, whash, colorhash"),
        ({"hashes": ()}, "hashes are none: give one or more, each once"),
        ({"hashes": "phash+phash"}, r"hashes are phash\+phash"),
        ({"radius": 17}, "radius is 17: give 0 to 16 bits"),
        ({"radius": -1}, "radius is -1"),
        ({"guards": ()}, "no guard is given"),
        ({"max_entries": 0}, "max_entries is 0"),
    ],
    ids=str,
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PerceptualIdentity(**options)
    with pytest.raises(ConfigError, match="max_cell is -1: give 0 or more"):
        ThumbnailGuard(max_cell=-1)

"""What telling images apart costs, and how well it does: `python -m tests.bench.bench_images`.

First milliseconds: identity of one-megapixel images, and searches among a thousand to a million hashes, beside the two
other kinds of index that were considered. Then, over twenty pictures and what may become of them, distances of each
hash and how many copies become their original under the defaults. Last, ten thousand unrelated pictures.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import combinations
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageOps

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from pictures import encode, photographs, random_picture, second_view

from mlserve.vision.guards import ThumbnailGuard
from mlserve.vision.hashes import DEFAULT_RADIUS, HashKind, hash_word, shrink
from mlserve.vision.identity import ExactIdentity, ImageIdentity, PerceptualIdentity
from mlserve.vision.image import DecodedImage, load_image
from mlserve.vision.index import HammingIndex

REPEATS = 41
UNRELATED = 10_000
Transform = Callable[[Image.Image], Image.Image]
SIGNS = {True: "+", False: "-", None: " "}


def milliseconds(work: Callable[[int], object], repeats: int = REPEATS) -> str:
    """Median and 95th percentile of `work(0)`, `work(1)`, ..."""
    times = []
    for turn in range(repeats):
        start = time.perf_counter()
        work(turn)
        times.append(1e3 * (time.perf_counter() - start))
    return f"{statistics.median(times):8.3f} {sorted(times)[int(0.95 * repeats)]:8.3f}"


def print_identity_times() -> None:
    """Identity of images that are new each time, and of one that is known."""
    print(f"identity, ms: median and 95th percentile of {REPEATS}\n")
    for side in (1000, 1024):
        identities: list[tuple[str, ImageIdentity]] = [("exact", ExactIdentity())]
        identities += [(f"perceptual, {kind}", PerceptualIdentity([kind])) for kind in HashKind]
        identities.append(("perceptual, phash+dhash", PerceptualIdentity("phash+dhash")))
        base = np.asarray(photographs()["astronaut"].resize((side, side)))
        images = [DecodedImage(np.roll(base, turn * 20, axis=1)) for turn in range(REPEATS)]
        for name, identity in identities:
            identity.identify(images[0], b"warm up")
            new = milliseconds(lambda turn, identity=identity, images=images: identity.identify(images[turn]))
            known = milliseconds(lambda turn, identity=identity, images=images: identity.identify(images[1]))
            print(f"{side}x{side} {name:26} new {new}   known {known}")


def print_search_times() -> None:
    """The index, and the same search by a BK-tree and by four bands of 16 bits."""
    print(f"\nsearch among random hashes of 64 bits, ms: median and 95th percentile of {REPEATS}\n")
    choices = random.Random(0)
    for count in (1_000, 10_000, 100_000, 1_000_000):
        words = [choices.getrandbits(64) for _ in range(count)]
        index: HammingIndex[int] = HammingIndex(1)
        for key, word in enumerate(words):
            index.add(key, [word])
        searches: dict[str, Callable[[int, int], object]] = {
            "index": lambda word, radius, index=index: index.near([word], [radius])
        }
        if count <= 100_000:
            searches["bands"] = banded(words)
            searches["BK-tree"] = bk_tree(words)
        for radius in (4, 6, 8, 10):
            for name, search in searches.items():
                turns = 5 if name == "BK-tree" else REPEATS
                spent = milliseconds(lambda _, s=search, r=radius: s(choices.getrandbits(64), r), turns)
                print(f"{count:>9} radius {radius:>2} {name:8} {spent}")


def banded(words: list[int]) -> Callable[[int, int], object]:
    """Of two words at most r apart, some band of four differs in at most r // 4 bits."""
    tables: list[defaultdict[int, set[int]]] = [defaultdict(set) for _ in range(4)]
    for key, word in enumerate(words):
        for band, table in enumerate(tables):
            table[word >> 16 * band & 0xFFFF].add(key)

    def search(word: int, radius: int) -> list[int]:
        flips = [0]
        for count in range(1, radius // 4 + 1):
            flips += [sum(1 << bit for bit in bits) for bits in combinations(range(16), count)]
        found: set[int] = set()
        for band, table in enumerate(tables):
            for flip in flips:
                found |= table.get(word >> 16 * band & 0xFFFF ^ flip, set())
        return [key for key in found if (words[key] ^ word).bit_count() <= radius]

    return search


def bk_tree(words: list[int]) -> Callable[[int, int], object]:
    """Children of a node by their distance from it."""
    children: list[dict[int, int]] = [{} for _ in words]
    for key in range(1, len(words)):
        node = 0
        while True:
            distance = (words[node] ^ words[key]).bit_count()
            if distance not in children[node]:
                children[node][distance] = key
                break
            node = children[node][distance]

    def search(word: int, radius: int) -> list[int]:
        found, nodes = [], [0]
        while nodes:
            node = nodes.pop()
            distance = (words[node] ^ word).bit_count()
            if distance <= radius:
                found.append(node)
            nodes += [child for d, child in children[node].items() if distance - radius <= d <= distance + radius]
        return found

    return search


def resized(factor: float, filter: Image.Resampling = Image.Resampling.BICUBIC) -> Transform:
    """Both sides times `factor`."""
    return lambda image: image.resize((round(image.width * factor), round(image.height * factor)), filter)


def compressed(quality: int) -> Transform:
    """As JPEG and back."""
    return lambda image: load_image(encode(image, "JPEG", quality=quality)).to_pil()


def cropped(percent: float) -> Transform:
    """That much of each side is gone, half of it at either end."""

    def crop(image: Image.Image) -> Image.Image:
        across, down = round(image.width * percent / 200), round(image.height * percent / 200)
        return image.crop((across, down, image.width - across, image.height - down))

    return crop


def written(text: str, left: float, top: float, size: float, opacity: int) -> Transform:
    """White text over it; left, top and size are parts of width, height and height."""

    def write(image: Image.Image) -> Image.Image:
        layer = Image.new("RGBA", image.size)
        place = (image.width * left, image.height * top)
        ImageDraw.Draw(layer).text(place, text, (255, 255, 255, opacity), font_size=image.height * size)
        return Image.alpha_composite(image.convert("RGBA"), layer).convert("RGB")

    return write


def with_ball(part: float) -> Transform:
    """A red ball of that part of the shorter side."""

    def add(image: Image.Image) -> Image.Image:
        image, radius = image.copy(), part * min(image.size) / 2
        x, y = image.width * 0.6, image.height * 0.4
        ImageDraw.Draw(image).ellipse((x - radius, y - radius, x + radius, y + radius), (230, 20, 20))
        return image

    return add


# True: a copy that should become the original. False: another picture, which must not. None: a matter of taste.
TRANSFORMS: Mapping[str, tuple[bool | None, Transform]] = {
    "resized to 1/2": (True, resized(0.5)),
    "resized to 0.3": (True, resized(0.3, Image.Resampling.BILINEAR)),
    "resized to 1.7": (True, resized(1.7)),
    **{f"JPEG, quality {quality}": (True, compressed(quality)) for quality in (90, 70, 50, 30)},
    **{f"cropped by {percent} %": (None, cropped(percent)) for percent in (1, 2, 3, 5, 10)},
    "brightness +10 %": (True, lambda image: ImageEnhance.Brightness(image).enhance(1.1)),
    "brightness -20 %": (None, lambda image: ImageEnhance.Brightness(image).enhance(0.8)),
    "contrast +10 %": (True, lambda image: ImageEnhance.Contrast(image).enhance(1.1)),
    "contrast -20 %": (None, lambda image: ImageEnhance.Contrast(image).enhance(0.8)),
    "small watermark": (None, written("(c) example", 0.6, 0.9, 1 / 16, 160)),
    "large watermark": (None, written("SAMPLE", 0.1, 0.4, 0.2, 110)),
    "red ball of 5 % added": (False, with_ball(0.05)),
    "red ball of 10 % added": (False, with_ball(0.1)),
    "mirrored": (False, ImageOps.mirror),
    "upside down": (False, ImageOps.flip),
    "red and blue swapped": (False, lambda image: Image.merge("RGB", image.split()[::-1])),
    "in grey": (False, lambda image: image.convert("L").convert("RGB")),
}


def print_transforms() -> None:
    """Hash distances, and matches for each kind of hash by its default radius."""
    radii = ", ".join(f"{kind} {radius}" for kind, radius in DEFAULT_RADIUS.items())
    print(
        f"\n{len(photographs())} pictures, each beside its changed copy: bits of distance, median / largest; matches by"
    )
    print(f"hash alone, then with the guard. Radii: {radii}. + should match, - must not\n")
    print(f"{'':30}" + "".join(f"{kind:^18}" for kind in HashKind) + "  phash+dhash")
    for name, (should_match, transform) in TRANSFORMS.items():
        pairs = [(image, transform(image)) for image in photographs().values()]
        changed = [(load_image(image), load_image(copy)) for image, copy in pairs if image.tobytes() != copy.tobytes()]
        print_pairs(f"{SIGNS[should_match]} {name} ({len(changed)})", changed)
    images = [load_image(image) for image in photographs().values()]
    print_pairs("- all other pairs (190)", list(combinations(images, 2)))
    print_pairs("- stereo pair (1)", [(load_image(photographs()["motorcycle_left"]), load_image(second_view()))])


def print_pairs(name: str, pairs: list[tuple[DecodedImage, DecodedImage]]) -> None:
    """One row of the table."""
    cells = []
    for kind in HashKind:
        distances = sorted(distance(kind, *pair) for pair in pairs)
        near = sum(d <= DEFAULT_RADIUS[kind] for d in distances)
        guarded = sum(matches(kind, *pair) for pair in pairs)
        cells.append(f"{distances[len(distances) // 2]:>3}/{distances[-1]:<2} {near:>3} {guarded:>3}     ")
    both = sum(matches("phash+dhash", *pair) for pair in pairs)
    print(f"{name:<30}" + "".join(cells) + f"{both:>6}")


def distance(kind: HashKind, first: DecodedImage, second: DecodedImage) -> int:
    """Bits in which two images' hashes differ."""
    return (hash_word(kind, shrink(first)) ^ hash_word(kind, shrink(second))).bit_count()


def matches(hashes: str, first: DecodedImage, second: DecodedImage) -> bool:
    """Whether the second becomes the first."""
    identity = PerceptualIdentity(hashes)
    identity.identify(first)
    return identity.identify(second).is_near


def print_unrelated() -> None:
    """Pictures that have nothing to do with each other, all in one index."""
    print(f"\n{UNRELATED} unrelated random pictures, and the time for all:")
    pictures = [load_image(random_picture(seed)) for seed in range(UNRELATED)]
    for name, identity in (
        ("phash", PerceptualIdentity()),
        ("phash, radius 16", PerceptualIdentity(radius=16)),
        ("dhash", PerceptualIdentity("dhash")),
        ("whash", PerceptualIdentity("whash")),
        ("colorhash", PerceptualIdentity("colorhash")),
        ("phash, a guard that agrees", PerceptualIdentity(guards=[ThumbnailGuard(255, 255, 255, 255)])),
    ):
        start = time.perf_counter()
        count = sum(identity.identify(picture).is_near for picture in pictures)
        seconds = time.perf_counter() - start
        print(f"{name:28} {count:>6} matches, {len(identity):>6} remembered, {seconds:.1f} s")


def main() -> None:
    """Print all tables."""
    print_identity_times()
    print_search_times()
    print_transforms()
    print_unrelated()


if __name__ == "__main__":
    main()

"""Identity by likeness: an image that looks like an earlier one of the same tenant becomes that one.

    hashes within their radii of an earlier image's  ->  shape alike  ->  every guard agrees  ->  a match

A match is never used as if pixels were equal: the request goes on as one about the canonical image, under its digest,
with its size. What is cached under a digest was computed from exactly those pixels.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from mlserve.errors import ConfigError
from mlserve.vision.guards import Guard, ThumbnailGuard
from mlserve.vision.hashes import DEFAULT_RADIUS, HashKind, hash_word, shrink
from mlserve.vision.image import DecodedImage
from mlserve.vision.index import HammingIndex
from mlserve.vision.match import ImageDigest, ImageMatch, image_digest

__all__ = ["PerceptualIdentity"]

MIN_SIDE = 32  # smaller images have too little in them: their hashes are of interpolated pixels
MIN_CONTRAST = 4.0  # standard deviation of grey values, 0 to 255, at 32x32; below, hashes are of rounding errors
MAX_STRETCH = 1.03  # ratio of two side ratios; resizing to whole pixels changes a side of 32 by half a pixel
MAX_ENLARGEMENT = 2.0  # how many times larger than its canonical image an image may be: details must not be lost
MAX_GUARDED = 16  # nearest candidates that the guards see; bounds the time of a search

Scope = bytes | None
_Key = tuple[Scope, ImageDigest]


@dataclass(frozen=True, slots=True)
class _Look:
    """What an image looks like."""

    width: int
    height: int
    words: tuple[int, ...]  # one hash for each kind
    features: tuple[npt.NDArray[np.generic], ...]  # one for each guard

    def has_shape_of(self, canonical: _Look) -> bool:
        stretch = self.width * canonical.height / (self.height * canonical.width)
        enlargement = max(self.width / canonical.width, self.height / canonical.height)
        return 1 / MAX_STRETCH <= stretch <= MAX_STRETCH and enlargement <= MAX_ENLARGEMENT


class PerceptualIdentity:
    """Finds earlier images by `imagehash` hashes, and confirms them by guards. Threads may share it.

    Images are compared within a scope only (a tenant's salt; None is a scope, too). Images without structure in their
    brightness, or smaller than 32 pixels, only ever match themselves. The `max_entries` images that were used last are
    remembered, over all scopes; each takes about 4 kB.
    """

    name = "perceptual"

    def __init__(
        self,
        hashes: Sequence[HashKind | str] = (HashKind.PHASH,),
        radius: int | None = None,
        guards: Iterable[Guard] = (ThumbnailGuard(),),
        max_entries: int = 16_384,
    ) -> None:
        """All `hashes` must be near: within `radius` bits, or by default each within its own `DEFAULT_RADIUS`.

        Raises `ConfigError` for unknown hashes, none or the same twice, no guards, and numbers out of range.
        """
        self.kinds = _parse_kinds(hashes)
        self.radii = tuple(DEFAULT_RADIUS[kind] if radius is None else radius for kind in self.kinds)
        self.guards = tuple(guards)
        self.max_entries = max_entries
        if not self.guards:
            raise ConfigError("no guard is given: near hashes alone are often those of different images")
        if not 0 <= min(self.radii) <= max(self.radii) <= 16:
            raise ConfigError(f"radius is {radius}: give 0 to 16 bits; unrelated photographs are 20 apart")
        if max_entries < 1:
            raise ConfigError(f"max_entries is {max_entries}: give a number from 1")
        self.hash_name = "+".join(self.kinds)
        self._lock = threading.Lock()  # guards all below
        self._looks: OrderedDict[_Key, _Look] = OrderedDict()  # least recently used first
        self._indexes: dict[Scope, HammingIndex[ImageDigest]] = {}  # none of them empty

    def __len__(self) -> int:
        return len(self._looks)

    def identify(self, image: DecodedImage, scope: Scope = None) -> ImageMatch:
        """See `ImageIdentity`. An image that matches no earlier one is canonical for later ones."""
        digest = image_digest(image)
        itself = ImageMatch.of_itself(image, digest)
        with self._lock:
            if (scope, digest) in self._looks:
                self._looks.move_to_end((scope, digest))
                return itself
        look = self._look(image)
        if look is None:
            return itself
        with self._lock:  # search and insertion are one: of two like images at once, one becomes canonical
            if (scope, digest) in self._looks:
                return itself
            found = self._find(scope, look)
            if found is None:
                self._insert(scope, digest, look)
                return itself
            distance, canonical = found
            self._looks.move_to_end((scope, canonical))
            size = self._looks[scope, canonical]
        return ImageMatch(canonical, size.width, size.height, digest, self.hash_name, distance)

    def forget(self, digest: ImageDigest, scope: Scope = None) -> None:
        """See `ImageIdentity`."""
        with self._lock:
            if (scope, digest) in self._looks:
                self._remove((scope, digest))

    def _look(self, image: DecodedImage) -> _Look | None:
        """None for an image that must not match another."""
        if min(image.width, image.height) < MIN_SIDE:
            return None
        shrunk = shrink(image)
        grey = shrunk.convert("L")
        if np.asarray(grey.reduce(4)).std() < MIN_CONTRAST:
            return None
        words = tuple(hash_word(kind, shrunk if kind is HashKind.COLORHASH else grey) for kind in self.kinds)
        features = tuple(guard.features(image, shrunk) for guard in self.guards)
        return _Look(image.width, image.height, words, features)

    def _find(self, scope: Scope, look: _Look) -> tuple[int, ImageDigest] | None:
        """The nearest image that all guards confirm, and its distance; of equally near ones the first in the index."""
        index = self._indexes.get(scope)
        if index is None:
            return None
        known = (
            (distance, digest, self._looks[scope, digest]) for distance, digest in index.near(look.words, self.radii)
        )
        alike = ((distance, digest, other) for distance, digest, other in known if look.has_shape_of(other))
        for distance, digest, other in islice(alike, MAX_GUARDED):
            pairs = zip(self.guards, other.features, look.features, strict=True)
            if all(guard.confirms(theirs, ours) for guard, theirs, ours in pairs):
                return distance, digest
        return None

    def _insert(self, scope: Scope, digest: ImageDigest, look: _Look) -> None:
        if len(self._looks) == self.max_entries:
            self._remove(next(iter(self._looks)))
        self._looks[scope, digest] = look
        self._indexes.setdefault(scope, HammingIndex(len(self.kinds))).add(digest, look.words)

    def _remove(self, key: _Key) -> None:
        scope, digest = key
        del self._looks[key]
        index = self._indexes[scope]
        index.remove(digest)
        if not len(index):
            del self._indexes[scope]


def _parse_kinds(hashes: Sequence[HashKind | str]) -> tuple[HashKind, ...]:
    """Also takes one string such as "phash+dhash"."""
    names = hashes.split("+") if isinstance(hashes, str) else list(hashes)
    for name in names:
        if name not in list(HashKind):
            raise ConfigError(f"there is no hash {name!r}: give one or more of {', '.join(HashKind)}")
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"hashes are {'+'.join(names) or 'none'}: give one or more, each once")
    return tuple(map(HashKind, names))

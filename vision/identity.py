"""When two images count as the same: if their pixels are equal, or, where that is allowed, if they look alike."""

from __future__ import annotations

from typing import Protocol

from mlserve.errors import ConfigError
from mlserve.vision.clip_guard import load_clip_guard
from mlserve.vision.guards import Guard, ThumbnailGuard
from mlserve.vision.hashes import HashKind
from mlserve.vision.image import DecodedImage
from mlserve.vision.match import ImageDigest, ImageMatch, image_digest
from mlserve.vision.perceptual import PerceptualIdentity

__all__ = ["ExactIdentity", "ImageIdentity", "PerceptualIdentity", "get_image_identity"]


class ImageIdentity(Protocol):
    """Tells which image a request is about. Threads share it."""

    @property
    def name(self) -> str:
        """How it is called in options and responses."""
        ...

    def identify(self, image: DecodedImage, scope: bytes | None = None) -> ImageMatch:
        """The canonical image of an image. Other images match only within the scope, such as a tenant's salt."""
        ...

    def forget(self, digest: ImageDigest, scope: bytes | None = None) -> None:
        """Match no image with that one any more.

        To be called when nothing is kept that was computed from its pixels: they aren't kept here either, so that a
        request which became one about it could not be answered. Unknown digests are ignored.
        """
        ...


class ExactIdentity:
    """Images are the same if size and pixels are, in whatever file they came."""

    name = "exact"

    def identify(self, image: DecodedImage, scope: bytes | None = None) -> ImageMatch:
        """See `ImageIdentity`. Depends on the image only."""
        return ImageMatch.of_itself(image, image_digest(image))

    def forget(self, digest: ImageDigest, scope: bytes | None = None) -> None:
        """Nothing is remembered."""


EXACT, PERCEPTUAL = ExactIdentity.name, PerceptualIdentity.name


def get_image_identity(name: str, radius: int | None = None, clip: str | None = None) -> ImageIdentity:
    """A new identity: exact, perceptual, or perceptual by the hashes that the name joins with `+`.

    radius: bits in which near hashes may differ. clip: a folder with an open_clip model, whose `ClipGuard` must agree.
    Raises `ConfigError` for an unknown name, a radius out of range, no such model, and what isn't for exact identity.
    """
    if name == EXACT:
        if radius is not None or clip is not None:
            raise ConfigError("image_radius and image_clip are for images that look alike: set image_identity, too")
        return ExactIdentity()
    hashes = [HashKind.PHASH] if name == PERCEPTUAL else name.split("+")
    if not set(hashes) <= set(HashKind):
        known = ", ".join((EXACT, PERCEPTUAL, *HashKind))
        raise ConfigError(
            f"image_identity is {name!r}: give one of {known}, hashes joined by +, or an ImageIdentity object"
        )
    guards: list[Guard] = [ThumbnailGuard()]
    if clip is not None:
        guards.append(load_clip_guard(clip))
    return PerceptualIdentity(hashes, radius, guards)

"""When two images count as the same: if their pixels are equal, or, where that is allowed, if they look alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from mlserve.errors import ConfigError
from mlserve.vision.image import DecodedImage
from mlserve.vision.match import ImageDigest, ImageMatch, image_digest
from mlserve.vision.perceptual import PerceptualIdentity

__all__ = ["IMAGE_IDENTITIES", "ExactIdentity", "ImageIdentity", "PerceptualIdentity", "get_image_identity"]


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


IMAGE_IDENTITIES: Mapping[str, Callable[[], ImageIdentity]] = MappingProxyType(
    {"exact": ExactIdentity, "perceptual": PerceptualIdentity}
)


def get_image_identity(name: str) -> ImageIdentity:
    """A new identity of that name, with its defaults. Raises `ConfigError` if there is none."""
    if name not in IMAGE_IDENTITIES:
        raise ConfigError(
            f"image_identity is {name!r}: give one of {', '.join(IMAGE_IDENTITIES)}, or an ImageIdentity object"
        )
    return IMAGE_IDENTITIES[name]()

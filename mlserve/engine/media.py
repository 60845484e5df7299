"""Images of a request, from what callers give to what an engine keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mlserve.cache.marks import Mark, MarkKind, salt_digest
from mlserve.engine.prompt import ImageText
from mlserve.errors import ConfigError, PromptError, RequestError
from mlserve.model.positions import RopePositions
from mlserve.request import ImageReport
from mlserve.vision.encoder import ImageLayout
from mlserve.vision.encoding import ImageEncoder
from mlserve.vision.families.mrope import mrope_positions
from mlserve.vision.identity import ExactIdentity, ImageIdentity
from mlserve.vision.image import DecodedImage, ImageLimits, load_image
from mlserve.vision.match import ImageMatch
from mlserve.vision.placement import PlacedImage, embedding_key, embeddings_digest, place_images
from mlserve.vision.source import ImageFetcher, ImageSource

__all__ = [
    "GivenImage",
    "IdentifiedImage",
    "ImageDesk",
    "image_mark",
    "image_report",
    "no_images_error",
    "take_images",
]

Message = Mapping[str, Any]
_IMAGE_KINDS = ("image", "image_url", "image_embeds")


@dataclass(frozen=True, slots=True)
class IdentifiedImage:
    """An image and which one it counts as, to requests of that scope."""

    image: DecodedImage
    match: ImageMatch
    scope: bytes | None


GivenImage = IdentifiedImage | Tensor  # or an image's embeddings, [n, H]


class ImageDesk:
    """Takes images in: decodes them under limits, tells which they are, and gives them their places in prompts."""

    def __init__(
        self,
        encoder: ImageEncoder,
        marker_id: int,
        identity: ImageIdentity,
        limits: ImageLimits,
        max_images: int,
        fetcher: ImageFetcher | None = None,
        default_identity: str | None = None,
    ) -> None:
        """`marker_id` is the token that a chat template writes for an image, `max_images` the most that a request may
        have; without a fetcher URLs are refused. `default_identity` is for requests that don't name one: by default
        the desk's own. Raises `ConfigError` if it is neither that nor exact."""
        self.encoder = encoder
        self.marker_id = marker_id
        self.identity = identity
        self._exact = ExactIdentity()
        self.limits = limits
        self.max_images = max_images
        self.fetcher = fetcher
        self._default = default_identity or identity.name
        if self._default not in (self._exact.name, identity.name):
            raise ConfigError(
                f"default_image_identity is {self._default!r}, and image_identity {identity.name!r}: give that, or "
                f"{self._exact.name!r}"
            )

    @property
    def text(self) -> ImageText:
        """How the model writes an image in a prompt."""
        model = self.encoder.model
        return ImageText(model.image_token, *model.surrounding_text)

    def identify(
        self,
        sources: Sequence[ImageSource | Tensor],
        cache_salt: str | None,
        identity: str | None = None,
        *,
        allow_paths: bool,
    ) -> list[GivenImage]:
        """Decode a request's images and name them; embeddings are taken as they are.

        identity: "exact", or the name of the desk's own; None for the default. Near-duplicates are looked for among
            requests of the same salt only.
        Any thread may call it. Raises `ImageError`, `PromptError` for too many images, and `RequestError` for an
        identity that isn't allowed.
        """
        if len(sources) > self.max_images:
            raise PromptError(
                f"the request has {len(sources)} images, limit {self.max_images}: send fewer or raise max_images"
            )
        if identity not in (None, self._exact.name, self.identity.name):
            raise RequestError(
                f"image_identity is {identity!r}, and this engine has {self.identity.name!r}: ask for that or for "
                f"{self._exact.name!r}, or set the engine's option"
            )
        chosen = self._exact if (identity or self._default) == self._exact.name else self.identity
        scope = None if cache_salt is None else salt_digest(cache_salt)
        return [
            source if isinstance(source, Tensor) else self._identified(source, chosen, scope, allow_paths)
            for source in sources
        ]

    def _identified(
        self, source: ImageSource, identity: ImageIdentity, scope: bytes | None, allow_paths: bool
    ) -> IdentifiedImage:
        image = load_image(source, self.limits, allow_paths=allow_paths, fetcher=self.fetcher)
        return IdentifiedImage(image, identity.identify(image, scope), scope)

    def place(self, prompt_ids: Sequence[int], images: Sequence[GivenImage]) -> tuple[list[int], list[PlacedImage]]:
        """Give each placeholder in a prompt its image: the prompt with all tokens of the images, and the images.

        Only the engine's thread may call it. Raises `PromptError` unless there are as many placeholders as images, or
        for embeddings of another shape than the model's; `ImageLimitError` for a size that the model can't take.
        """
        found = [self._embedded(image) if isinstance(image, Tensor) else self._own(image) for image in images]
        layouts = [image.layout for image in found]
        ids, starts = place_images(prompt_ids, self.marker_id, layouts)
        bidirectional = self.encoder.model.bidirectional
        placed = [
            replace(image, start=start, is_bidirectional=bidirectional)
            for image, start in zip(found, starts, strict=True)
        ]
        return ids, placed

    def rope_positions(self, num_tokens: int, images: Sequence[PlacedImage]) -> RopePositions | None:
        """Where a prompt's tokens stand, for models to which an image has rows and columns."""
        if not images or not self.encoder.model.uses_mrope:
            return None
        grids = [(image.span[0], image.layout.grid) for image in images if image.layout.grid is not None]
        positions, offset = mrope_positions(num_tokens, grids)
        return RopePositions(positions.numpy(), offset)

    def _own(self, given: IdentifiedImage) -> PlacedImage:
        model, match = self.encoder.model, given.match
        if match.is_near:
            key = embedding_key(match.digest, model.digest, given.scope)
            embeddings = self.encoder.cache.get(key)
            if embeddings is not None:
                layout = model.layout(match.width, match.height)
                return PlacedImage(key, layout, 0, embeddings=embeddings, match=match)
            self.identity.forget(match.digest, given.scope)  # its pixels aren't kept: it can't be encoded again
            match = ImageMatch.of_itself(given.image, match.own_digest)
        key = embedding_key(match.digest, model.digest, given.scope)
        return PlacedImage(key, model.layout(match.width, match.height), 0, given.image, match=match)

    def _embedded(self, embeddings: Tensor) -> PlacedImage:
        model = self.encoder.model
        if embeddings.dim() != 2 or embeddings.shape[1] != model.hidden_size or not len(embeddings):
            raise PromptError(
                f"image embeddings have the shape {list(embeddings.shape)}: give [n, {model.hidden_size}], n from 1"
            )
        if not torch.isfinite(embeddings).all():
            raise PromptError("image embeddings have values that are not finite numbers: send finite ones")
        if model.uses_mrope:
            raise PromptError("image embeddings have no grid of rows and columns, which this model needs: send images")
        layout = ImageLayout.of([model.placeholder_id] * len(embeddings), model.placeholder_id)
        return PlacedImage(embeddings_digest(embeddings), layout, 0, embeddings=embeddings)


def no_images_error(num_images: int) -> PromptError:
    """For images that came to a model without a vision part."""
    return PromptError(f"the model takes no images, and {num_images} came: use a vision-language model")


def image_mark(image: PlacedImage) -> Mark:
    """What keeps its KV apart from that of other images."""
    return Mark(MarkKind.EMBEDS if image.match is None else MarkKind.IMAGE, image.key, *image.span)


def image_report(image: PlacedImage) -> ImageReport | None:
    """What a response says of it; nothing of embeddings that came with the request."""
    match = image.match
    if match is None:
        return None
    return ImageReport(match.own_digest, match.digest, match.hash_name, match.distance)


def take_images(messages: Sequence[Message]) -> tuple[list[Message], list[ImageSource | Tensor]]:
    """Take the images out of a conversation: messages whose image parts are `{"type": "image"}`, for the template, and
    the images in their order. Parts are `{"type": "image_url", "image_url": {"url": ...}}`, as in OpenAI's API,
    `{"type": "image", "image": ...}`, or `{"type": "image_embeds", "image_embeds": tensor}`.

    Raises `PromptError` for image parts without an image.
    """
    plain: list[Message] = []
    sources: list[ImageSource | Tensor] = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, str) or not isinstance(content, Sequence):
            plain.append(message)
            continue
        parts = []
        for part in content:
            if isinstance(part, Mapping) and part.get("type") in _IMAGE_KINDS:
                sources.append(_source(part))
                parts.append({"type": "image"})
            else:
                parts.append(part)
        plain.append({**message, "content": parts})
    return plain, sources


def _source(part: Message) -> ImageSource | Tensor:
    kind = part["type"]
    value = part.get(kind)
    if kind == "image_url" and isinstance(value, Mapping):
        value = value.get("url")
    if value is None or (kind == "image_embeds") != isinstance(value, Tensor):
        wanted = "a tensor [n, H]" if kind == "image_embeds" else "an image"
        raise PromptError(f"a part of type {kind!r} has {type(value).__name__} under {kind!r}: give {wanted}")
    source: ImageSource | Tensor = value
    return source

"""From a step's images to their embeddings: what is cached, and one batch for what isn't."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from mlserve.vision.embedding_cache import EmbeddingCache
from mlserve.vision.encoder import VisionModel
from mlserve.vision.placement import PlacedImage

__all__ = ["ImageEncoder"]


class ImageEncoder:
    """A vision model and its embedding cache. Belongs to the engine's thread."""

    def __init__(self, model: VisionModel, cache: EmbeddingCache) -> None:
        self.model = model
        self.cache = cache

    def embeddings(self, images: Iterable[PlacedImage]) -> dict[bytes, Tensor]:
        """`[n, H]` by the images' keys. Those that aren't cached are encoded in one batch, equal ones once."""
        found: dict[bytes, Tensor] = {}
        missing: dict[bytes, PlacedImage] = {}
        for image in images:
            if image.key in found or image.key in missing:
                continue
            known = image.embeddings if image.image is None else self.cache.get(image.key)
            if known is None:
                missing[image.key] = image
            else:
                found[image.key] = known
        if missing:
            encoded = self.model.encode([image.image for image in missing.values() if image.image is not None])
            for key, embeddings in zip(missing, encoded, strict=True):
                self.cache.put(key, embeddings)
                found[key] = embeddings
        return found

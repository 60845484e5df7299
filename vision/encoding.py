"""From a step's images to their embeddings: what is cached, and one batch for what isn't."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

from torch import Tensor

from mlserve.vision.embedding_cache import EmbeddingCache
from mlserve.vision.encoder import VisionModel
from mlserve.vision.placement import Chunk, PlacedImage

__all__ = ["ImageEncoder"]


class ImageEncoder:
    """A vision model and its embedding cache. Belongs to the engine's thread."""

    def __init__(self, model: VisionModel, cache: EmbeddingCache) -> None:
        self.model = model
        self.cache = cache
        # Of images that are in part computed: held for later chunks, whatever the cache evicts, until the request ends.
        self._unfinished: WeakKeyDictionary[PlacedImage, Tensor] = WeakKeyDictionary()

    def embeddings(self, pieces: Sequence[tuple[PlacedImage, Chunk]]) -> dict[bytes, Tensor]:
        """`[n, H]` by the images' keys, for the chunks of a step. Those that aren't there are encoded in one batch,
        equal ones once. They are kept until their last chunk, or until nobody holds the image any more."""
        found = self._found(image for image, _ in pieces)
        for image, chunk in pieces:
            if chunk.last < image.layout.num_embeddings:
                self._unfinished[image] = found[image.key]
            else:
                self._unfinished.pop(image, None)
        return found

    def _found(self, images: Iterable[PlacedImage]) -> dict[bytes, Tensor]:
        found: dict[bytes, Tensor] = {}
        missing: dict[bytes, PlacedImage] = {}
        for image in images:
            if image.key in found or image.key in missing:
                continue
            known = image.embeddings if image.image is None else self._unfinished.get(image)
            if known is None:
                known = self.cache.get(image.key)
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

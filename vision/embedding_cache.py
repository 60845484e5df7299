"""Encoder outputs that are kept, so that a picture that comes again isn't encoded again."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor

__all__ = ["EmbeddingCache", "EmbeddingStats"]


@dataclass(frozen=True, slots=True)
class EmbeddingStats:
    """Figures since the start, and what is held now."""

    num_images: int
    num_bytes: int
    hits: int
    misses: int


class EmbeddingCache:
    """Embeddings by key, the least recently used evicted first, in at most `max_bytes`.

    Nobody waits for room: what doesn't fit is simply not kept, and is encoded again if it is needed again. So a full
    cache never holds up a request. What a request still needs, `ImageEncoder` holds beside it. A key must cover all
    that the embeddings depend on. Belongs to one thread.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._embeddings: OrderedDict[bytes, Tensor] = OrderedDict()  # least recently used first
        self._num_bytes = 0
        self._hits = 0
        self._misses = 0

    def get(self, key: bytes) -> Tensor | None:
        """`[n, H]`, None if it isn't here. A use."""
        found = self._embeddings.get(key)
        if found is None:
            self._misses += 1
            return None
        self._hits += 1
        self._embeddings.move_to_end(key)
        return found

    def put(self, key: bytes, embeddings: Tensor) -> None:
        """Keep `embeddings: [n, H]`, unless they are larger than the whole cache."""
        if key in self._embeddings or embeddings.nbytes > self.max_bytes:
            return
        self._embeddings[key] = embeddings
        self._num_bytes += embeddings.nbytes
        while self._num_bytes > self.max_bytes:
            _, evicted = self._embeddings.popitem(last=False)
            self._num_bytes -= evicted.nbytes

    def clear(self) -> None:
        """Forget everything."""
        self._embeddings.clear()
        self._num_bytes = 0

    def stats(self) -> EmbeddingStats:
        """Current figures."""
        return EmbeddingStats(len(self._embeddings), self._num_bytes, self._hits, self._misses)

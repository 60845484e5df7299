"""Figures of a whole engine at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from mlserve.cache.manager import CacheStats
from mlserve.vision.embedding_cache import EmbeddingStats

__all__ = ["EngineStats"]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts are since the start, everything else is as it stands now."""

    cache: CacheStats
    num_running: int  # sequences
    num_waiting: int  # sequences
    num_loading: int  # requests that wait for their adapter to be read
    adapter_swaps: int  # adapters that were written into a slot
    embeddings: EmbeddingStats | None  # None: the model takes no images

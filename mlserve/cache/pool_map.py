"""What every block of a pool holds at one moment, for people to look at."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mlserve.cache.hashing import TOKEN_BYTES
from mlserve.cache.manager import CacheManager
from mlserve.cache.marks import MarkKind, decode_marks, encode_marks

__all__ = ["BlockState", "BlockView", "pool_map"]


class BlockState(StrEnum):
    """Whether a block can be handed out, and whether it can be hit."""

    FREE = "free"  # blank
    CACHED = "cached"  # named, and in no table: hit or evicted next
    IN_USE = "in_use"  # in at least one table


@dataclass(frozen=True, slots=True)
class BlockView:
    """One block. The digests are those of its marks; salts aren't told."""

    state: BlockState
    references: int = 0  # tables that hold it
    adapter: bytes | None = None
    image: bytes | None = None  # or of embeddings; of several the first


_FREE = BlockView(BlockState.FREE)


def pool_map(cache: CacheManager) -> list[BlockView]:
    """All blocks but block 0, in order. O(blocks): 1 microsecond each."""
    stride = TOKEN_BYTES * cache.block_size
    encodings = {
        block_id: encode_marks(seq.marks, at, cache.block_size)
        for seq in cache.sequences()
        for at, block_id in enumerate(seq.table)
        if seq.marks
    }
    views = []
    for block_id, (references, content) in enumerate(cache.pool.uses()):
        encoding = encodings.get(block_id, b"") if content is None else content[stride:]
        if references:
            views.append(_view(BlockState.IN_USE, references, encoding))
        else:
            views.append(_FREE if content is None else _view(BlockState.CACHED, 0, encoding))
    return views[1:]


def _view(state: BlockState, references: int, encoding: bytes) -> BlockView:
    marks = decode_marks(encoding) if encoding else []
    adapter = next((digest for kind, digest in marks if kind is MarkKind.ADAPTER), None)
    image = next((digest for kind, digest in marks if kind in (MarkKind.IMAGE, MarkKind.EMBEDS)), None)
    return BlockView(state, references, adapter, image)

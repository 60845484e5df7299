"""Marks: everything besides tokens that can change what a KV block contains.

An adapter, an image, a tenant's salt or caller-supplied embeddings mark a range of tokens. A block's name covers the
marks that overlap it, so that two blocks share memory only if their tokens and all that acted on them are equal.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

__all__ = ["Mark", "MarkKind", "decode_marks", "encode_marks", "encode_runs", "salt_digest", "salt_mark"]

_SALT_KEY = b"mlserve cache salt, version 1"
# An entry: tag, digest length, first and end token in the block, length of the medium | digest | offset in the medium
_HEAD = struct.Struct("<BBIIQ")
_OFFSET = struct.Struct("<Q")
_pack_offset = _OFFSET.pack


class MarkKind(IntEnum):
    """What a mark stands for. The value is its tag in the encoding: one byte that never gets another meaning."""

    ADAPTER = 1
    IMAGE = 2
    SALT = 3
    EMBEDS = 4


_MEDIA = (MarkKind.IMAGE, MarkKind.EMBEDS)


@dataclass(frozen=True, slots=True)
class Mark:
    """`digest` acts on the tokens [start, end); `end=None` means to the end of the sequence, however long it grows.

    The digest must cover all that matters: of an adapter its weights and scaling, of an image its pixels and how they
    are processed. Raises `ValueError` for an empty or negative range and for a digest not of 16 to 64 bytes.
    """

    kind: MarkKind
    digest: bytes
    start: int
    end: int | None

    def __post_init__(self) -> None:
        if self.start < 0:
            raise ValueError(f"a mark starts at {self.start}: give a token position, 0 or more")
        if self.end is not None and self.end <= self.start:
            raise ValueError(
                f"a mark covers no token, [{self.start}, {self.end}): give an end above its start, or None"
            )
        if not 16 <= len(self.digest) <= 64:
            raise ValueError(f"a mark's digest has {len(self.digest)} bytes: give 16 to 64")


def salt_digest(salt: str) -> bytes:
    """What stands for a salt: a keyed BLAKE2b of 32 bytes."""
    # surrogatepass: JSON can carry lone surrogates, and no two salts may meet.
    return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), key=_SALT_KEY, digest_size=32).digest()


def salt_mark(salt: str, start: int = 0) -> Mark:
    """Keep KV from `start` on to those who know `salt` (a tenant, a `cache_salt`)."""
    return Mark(MarkKind.SALT, salt_digest(salt), start, None)


def encode_marks(marks: Sequence[Mark], block: int, block_size: int) -> bytes:
    """Canonical encoding of the marks over the tokens [block * block_size, (block + 1) * block_size); b'' if none.

    Equal for equal marks in any order, different for different ones: each entry carries its kind's tag and its digest's
    length, and entries are sorted. Positions are relative to the block: the chain of keys fixes the block's own place.

    - All kinds: where in the block the mark starts and ends. Whether it goes on after the block doesn't matter, because
      later tokens don't change earlier KV: an adapter over [0, 32) and one over [0, None) share those 32 tokens.
    - Images and embeddings: also how far into the medium the block is, because placeholder tokens are all equal (one
      image of eight tokens is not two of four), and the medium's length, because some models let all tokens of an image
      see each other. An adapter or a salt acts on every token alike: neither is encoded, so nothing more is split.
    """
    entries = _entries(marks, block, block_size)
    return b"".join([head + _pack_offset(offset) for head, offset, _ in entries])


def decode_marks(encoding: bytes) -> list[tuple[MarkKind, bytes]]:
    """Kind and digest of each mark in what `encode_marks` gave."""
    found, at = [], 0
    while at < len(encoding):
        kind, size, *_ = _HEAD.unpack_from(encoding, at)
        start = at + _HEAD.size
        found.append((MarkKind(kind), encoding[start : start + size]))
        at = start + size + _OFFSET.size
    return found


def encode_runs(
    marks: Sequence[Mark], first: int, last: int, block_size: int
) -> Iterator[tuple[int, int, list[bytes]]]:
    """What `encode_marks` gives for each of the blocks [first, last), as runs `(begin, end, encodings)`, in order.

    Blocks without marks are in no run and cost nothing. Where no mark starts or ends, entries are made once for the
    whole run; only offsets in media advance with the blocks.
    """
    if last - first == 1 and marks:  # decoding: one block at a time
        encoding = encode_marks(marks, first, block_size)
        if encoding:
            yield first, last, [encoding]
        return
    to_come = sorted(marks, key=lambda mark: mark.start, reverse=True)
    active: list[Mark] = []
    for begin, end in pairwise(_bounds(marks, first, last, block_size)):
        while to_come and to_come[-1].start < end * block_size:
            active.append(to_come.pop())
        active = [mark for mark in active if mark.end is None or mark.end > begin * block_size]
        if active:
            columns = [
                [head + _pack_offset(offset + block * step) for block in range(end - begin)]
                if step
                else [head + _pack_offset(offset)] * (end - begin)
                for head, offset, step in _entries(active, begin, block_size)
            ]
            yield begin, end, columns[0] if len(columns) == 1 else list(map(b"".join, zip(*columns, strict=True)))


def _bounds(marks: Sequence[Mark], first: int, last: int, block_size: int) -> list[int]:
    """Sorted block numbers in [first, last] between which each mark covers blocks wholly or not at all."""
    bounds = {first, last}
    for mark in marks:
        begin = mark.start // block_size
        bounds.update((begin, begin + 1))
        if mark.end is not None:
            bounds.update(((mark.end - 1) // block_size, -(-mark.end // block_size)))
    return sorted(bound for bound in bounds if first <= bound <= last)


def _entries(marks: Sequence[Mark], block: int, block_size: int) -> list[tuple[bytes, int, int]]:
    """Sorted entries of one block: everything but the offset, the offset, and what it grows by from block to block."""
    start, end = block * block_size, (block + 1) * block_size
    entries = set()
    for mark in marks:
        if mark.start >= end or (mark.end is not None and mark.end <= start):
            continue
        from_token = max(mark.start, start)
        to_token = end if mark.end is None else min(mark.end, end)
        offset = length = step = 0
        if mark.kind in _MEDIA:
            offset, step = from_token - mark.start, block_size
            length = 0 if mark.end is None else mark.end - mark.start
        head = _HEAD.pack(mark.kind, len(mark.digest), from_token - start, to_token - start, length)
        entries.add((head + mark.digest, offset, step))
    return sorted(entries)

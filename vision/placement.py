"""Images in a prompt: which tokens stand for which embeddings."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mlserve.errors import PromptError
from mlserve.vision.encoder import ImageLayout
from mlserve.vision.image import DecodedImage
from mlserve.vision.match import ImageMatch

__all__ = ["Chunk", "PlacedImage", "embedding_key", "embeddings_digest", "place_images"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Embeddings [first, last) of an image stand at the prompt's tokens from `start` on."""

    start: int
    first: int
    last: int


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PlacedImage:
    """One image of a prompt, or embeddings in its place. `key` names the embeddings: equal keys have equal ones."""

    key: bytes
    layout: ImageLayout
    start: int  # where layout.token_ids begins in the prompt
    image: DecodedImage | None = None  # what they are computed from
    embeddings: Tensor | None = None  # [num_embeddings, H] if they are there already; one of both is
    match: ImageMatch | None = None  # which image it counts as; None if the caller gave the embeddings
    is_bidirectional: bool = False  # whether the embedded tokens of a range see each other, later ones too

    @property
    def span(self) -> tuple[int, int]:
        """From its first embedded token to behind its last: KV from there on depends on the image."""
        embedded = self.layout.embedded
        return self.start + embedded[0][0], self.start + embedded[-1][1]

    @property
    def whole_ranges(self) -> list[tuple[int, int]]:
        """The prompt's ranges [start, end) that must be computed in one step."""
        if not self.is_bidirectional:
            return []
        return [(self.start + first, self.start + last) for first, last in self.layout.embedded]

    def chunks(self, begin: int, end: int) -> Iterator[Chunk]:
        """Its embeddings that stand at the prompt's tokens [begin, end)."""
        done = 0
        for first, last in self.layout.embedded:
            start = self.start + first
            low, high = max(start, begin), min(self.start + last, end)
            if low < high:
                yield Chunk(low, done + low - start, done + high - start)
            done += last - first


def embeddings_digest(embeddings: Tensor) -> bytes:
    """Names embeddings that a caller supplies, `[n, H]`: 32 bytes over their shape and values."""
    values = embeddings.detach().float().cpu().contiguous()
    digest = hashlib.blake2b(repr(tuple(values.shape)).encode(), digest_size=32, person=b"mlserve embeds")
    digest.update(values.view(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def embedding_key(identity: bytes, encoder: bytes, scope: bytes | None = None) -> bytes:
    """Names the embeddings that an encoder, of that digest, makes of an image of that identity. 32 bytes.

    Those of different scopes (tenants' salts) don't meet: how soon an answer begins would tell what others sent.
    """
    parts = (identity, encoder, b"" if scope is None else scope)
    data = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hashlib.blake2b(data, digest_size=32, person=b"mlserve image").digest()


def place_images(
    prompt_ids: Sequence[int], marker_id: int, layouts: Sequence[ImageLayout]
) -> tuple[list[int], list[int]]:
    """Replace the i-th `marker_id` by the tokens of `layouts[i]`: the prompt, and where each begins.

    Raises `PromptError`, naming both counts, unless there are as many markers as images.
    """
    places = [at for at, token in enumerate(prompt_ids) if token == marker_id]
    if len(places) != len(layouts):
        raise PromptError(
            f"the prompt has {len(places)} image placeholders for {len(layouts)} images: give one for each"
        )
    ids: list[int] = []
    starts = []
    done = 0
    for place, layout in zip(places, layouts, strict=True):
        ids += prompt_ids[done:place]
        starts.append(len(ids))
        ids += layout.token_ids
        done = place + 1
    return [*ids, *prompt_ids[done:]], starts

"""The contract between image models and the engine: how an image stands in a prompt, and what is put there.

An image takes part in a prompt twice. When the prompt is laid out, the token that a chat template writes for it becomes
the tokens of an `ImageLayout`, which depend on the image's size alone. When these tokens are computed, some of them get
the encoder's embeddings instead of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from torch import Tensor

from mlserve.vision.image import DecodedImage

__all__ = ["ImageLayout", "TensorSource", "TextEncoder", "VisionModel"]

# A text's token ids: literals of special tokens become these tokens, and nothing is put before or after.
TextEncoder = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """The tokens that one image is in a prompt."""

    token_ids: tuple[int, ...]  # placeholders, and what the model's family puts around and between them
    embedded: tuple[tuple[int, int], ...]  # half-open ranges of `token_ids` that get embeddings, in the encoder's order
    grid: tuple[int, int, int] | None = None  # frames, rows and columns of embeddings; for models with M-RoPE only

    @classmethod
    def of(cls, token_ids: Sequence[int], placeholder_id: int, grid: tuple[int, int, int] | None = None) -> ImageLayout:
        """The layout of tokens all of whose placeholders get embeddings."""
        embedded, start = [], 0
        for is_placeholder, run in groupby(token_ids, lambda token: token == placeholder_id):
            end = start + len(list(run))
            if is_placeholder:
                embedded.append((start, end))
            start = end
        return cls(tuple(token_ids), tuple(embedded), grid)

    @property
    def num_embeddings(self) -> int:
        """How many rows the encoder makes of the image."""
        return sum(end - start for start, end in self.embedded)


class VisionModel(Protocol):
    """The vision part of a model: image processor, tower and projector.

    Threads may share it. Attributes never change.
    """

    placeholder_id: int  # stands where an embedding goes
    image_token: str  # what a chat template writes for an image: one special token, which the layout replaces
    surrounding_text: tuple[str, str]  # put before and after the layout, and encoded as one with the text around it
    hidden_size: int  # of an embedding, H
    bidirectional: bool  # whether the embedded tokens of one range attend to all others of it, later ones too
    uses_mrope: bool  # whether positions are those of `mrope_positions`
    digest: bytes  # of all that embeddings depend on besides the pixels: weights, settings, dtype
    tensor_names: frozenset[str]  # in the checkpoint: those of this part

    def layout(self, width: int, height: int) -> ImageLayout:
        """The tokens of an image of that many pixels. Raises `ImageLimitError` for a size that the model can't take."""
        ...

    def encode(self, images: Sequence[DecodedImage]) -> list[Tensor]:
        """The images' embeddings, each `[num_embeddings of its layout, H]` float32 on the model's device.

        Images are computed together. They aren't multiplied by what some models multiply embeddings of tokens with.
        """
        ...


class TensorSource(Protocol):
    """Tensors of one checkpoint, by name."""

    shapes: Mapping[str, tuple[int, ...]]

    def read(self, name: str) -> Tensor:
        """A tensor of its own memory, floating point, on the CPU."""
        ...

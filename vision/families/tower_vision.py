"""What the vision parts of all families have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mlserve.errors import UnsupportedModelError
from mlserve.vision.encoder import ImageLayout, TextEncoder
from mlserve.vision.families.opening import Tower
from mlserve.vision.image import DecodedImage

__all__ = ["TowerVision", "check_token"]


class TowerVision(ABC):
    """A `VisionModel` on a `Tower`; families add their layout and their way from pixels to embeddings."""

    surrounding_text: tuple[str, str] = ("", "")
    bidirectional: bool = False
    uses_mrope: bool = False

    def __init__(self, tower: Tower, image_token: str, placeholder_id: int, hidden_size: int) -> None:
        self.image_token = image_token
        self.placeholder_id = placeholder_id
        self.hidden_size = hidden_size
        self.digest = tower.digest
        self.tensor_names = tower.tensor_names
        self._tower = tower

    @abstractmethod
    def layout(self, width: int, height: int) -> ImageLayout:
        """See `VisionModel`."""

    def encode(self, images: Sequence[DecodedImage]) -> list[Tensor]:
        """See `VisionModel`."""
        if not images:
            return []
        # A PIL image says which axis is the channels'; of an array of 3 rows, image processors would have to guess.
        # One by one, since batches are padded.
        process = self._tower.processor
        inputs = [process(images=image.to_pil(), return_tensors="pt") for image in images]
        with torch.no_grad():
            return [embeddings.float() for embeddings in self._embed(images, inputs)]

    @abstractmethod
    def _embed(self, images: Sequence[DecodedImage], inputs: Sequence[Mapping[str, Any]]) -> Sequence[Tensor]:
        """Embeddings of each image, `[n, H]` of any dtype, from what the image processor made of it."""


def check_token(encode_text: TextEncoder, literal: str, token_id: int) -> None:
    """Raise `UnsupportedModelError` unless a text's literal is the token that the config gives."""
    found = list(encode_text(literal))
    if found != [token_id]:
        raise UnsupportedModelError(
            f"the tokenizer encodes {literal!r} to {found}, but the model's config says that it is {token_id}: "
            "tokenizer and config are of different models"
        )

"""A guard by meaning: the cosine of two images' embeddings in an open_clip model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from mlserve.errors import ConfigError
from mlserve.vision.image import DecodedImage

__all__ = ["ClipGuard", "load_clip_guard"]

WEIGHTS_FILE = "open_clip_model.safetensors"


class ImageEncoder(Protocol):
    """What is used of an open_clip model."""

    def encode_image(self, image: Tensor) -> Tensor:
        """[N, 3, H, W] -> [N, D]."""
        ...


class ClipGuard:
    """Confirms images whose embeddings have a cosine of at least `min_cosine`.

    To be used beside `ThumbnailGuard`, not in its place: CLIP hardly tells an image from its mirror image. Every new
    image is encoded, whether another is near or not.
    """

    def __init__(
        self,
        model: ImageEncoder,
        preprocess: Callable[[Image.Image], Tensor],
        min_cosine: float = 0.95,
        device: torch.device | str = "cpu",
    ) -> None:
        """`model` and `preprocess` are those of `open_clip.create_model_from_pretrained`, the model on `device` and in
        eval mode. Raises `ConfigError` for a cosine out of range."""
        if not 0 < min_cosine <= 1:
            raise ConfigError(f"min_cosine is {min_cosine}: give a number above 0, at most 1")
        self._model = model
        self._preprocess = preprocess
        self._device = device
        self.min_cosine = min_cosine

    def features(self, image: DecodedImage, shrunk: Image.Image) -> npt.NDArray[np.float32]:
        """[D], of length 1."""
        pixels = self._preprocess(image.to_pil()).to(self._device)
        with torch.inference_mode():
            embedding = self._model.encode_image(pixels[None])[0].float()
        unit: npt.NDArray[np.float32] = torch.nn.functional.normalize(embedding, dim=0).cpu().numpy()
        return unit

    def confirms(self, canonical: npt.NDArray[np.generic], new: npt.NDArray[np.generic]) -> bool:
        """See `Guard`."""
        # Unit vectors in float32: of an image with itself the product may be 1e-7 short of 1.
        return bool(np.dot(canonical, new) >= self.min_cosine - 1e-6)


def load_clip_guard(folder: str | Path, device: torch.device | str = "cpu") -> ClipGuard:
    """The guard by a model of open_clip: a folder with `open_clip_config.json` and weights as safetensors.

    Raises `ConfigError` if there is none that can be loaded.
    """
    import open_clip  # takes a second, and few need it

    path = Path(folder)
    weights = path / WEIGHTS_FILE
    if not weights.is_file():  # open_clip would also take pickled weights
        raise ConfigError(f"image_clip is {str(path)!r}, which has no {WEIGHTS_FILE}: give a folder of open_clip's")
    try:
        model, preprocess = open_clip.create_model_from_pretrained(f"local-dir:{path}", device=device)
    except Exception as error:  # of as many kinds as there are ways to be broken
        raise ConfigError(
            f"the open_clip model in {str(path)!r} can't be loaded ({type(error).__name__}: {error}): save it again"
        ) from error
    return ClipGuard(model.eval(), preprocess, device=device)

"""LLaVA with a tower of open_clip's.

The checkpoint is LLaVA's: `vision_config` of config.json has the `model_type` "open_clip", and the tower's tensors are
those of open_clip's `visual`, named `vision_tower.` and so on. Beside it lies open_clip's own open_clip_config.json,
whose `model_cfg` describes the tower, and whose `preprocess_cfg` says what becomes of an image.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import open_clip
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from torch import Tensor, nn
from transformers import LlavaConfig
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

from mlserve.errors import UnsupportedModelError
from mlserve.vision.encoder import ImageLayout
from mlserve.vision.families.llava import IMAGE_TOKEN
from mlserve.vision.families.opening import (
    Tower,
    VisionFiles,
    check_processed_size,
    load_tower,
    model_config,
    without_weights,
)
from mlserve.vision.families.tower_vision import TowerVision, check_token
from mlserve.vision.image import DecodedImage

__all__ = ["OpenClipLlavaVision", "OpenClipProcessor", "open_open_clip_llava"]

CONFIG_FILE = "open_clip_config.json"
_NO_TEXT = open_clip.CLIPTextCfg(context_length=1, vocab_size=1, width=64, heads=1, layers=1)


class OpenClipProcessor:
    """open_clip's preprocessing with the interface of transformers' image processors."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = dict(settings)
        self._transform = image_transform_v2(PreprocessCfg(**settings), is_train=False)

    def __call__(self, images: Image.Image, return_tensors: str) -> dict[str, Tensor]:
        """The pixels of one image, `[1, 3, S, S]` float32; `return_tensors` is "pt"."""
        return {"pixel_values": self._transform(images)[None]}

    def to_dict(self) -> dict[str, Any]:
        """All settings."""
        return self._settings


class _OpenClipLlava(nn.Module):
    """Tower and projector; a layer's output is one of the features that are joined for an embedding."""

    def __init__(self, model_cfg: Mapping[str, Any], config: Any) -> None:
        super().__init__()
        self.vision_tower = open_clip.CLIP(**model_cfg, text_cfg=_NO_TEXT).visual
        self.vision_tower.proj = None  # these two are behind the layers whose outputs are asked for
        self.vision_tower.ln_post = nn.Identity()
        self.multi_modal_projector = LlavaMultiModalProjector(config)
        layers = config.vision_feature_layer
        self._blocks = [_block_index(i, model_cfg) for i in ([layers] if isinstance(layers, int) else layers)]
        self._drops_class_token = config.vision_feature_select_strategy == "default"

    def forward(self, pixels: Tensor) -> Tensor:
        """`[images, 3, S, S]` -> `[images, n, H]`"""
        taken = sorted(set(self._blocks))
        found = self.vision_tower.forward_intermediates(
            pixels,
            indices=taken,
            stop_early=True,
            intermediates_only=True,
            output_fmt="NLC",
            output_extra_tokens=True,
        )
        parts = []
        for block in self._blocks:
            patches, class_token = (
                found[key][taken.index(block)] for key in ("image_intermediates", "image_intermediates_prefix")
            )
            parts.append(patches if self._drops_class_token else torch.cat([class_token, patches], dim=1))
        embeddings: Tensor = self.multi_modal_projector(torch.cat(parts, dim=-1))
        return embeddings


def _block_index(layer: int, model_cfg: Mapping[str, Any]) -> int:
    """transformers counts the embeddings before the first block as layer 0, or from the end."""
    num_blocks = model_cfg["vision_cfg"].layers
    block = num_blocks + layer if layer < 0 else layer - 1
    if not 0 <= block < num_blocks:
        raise UnsupportedModelError(
            f"vision_feature_layer is {layer}, but open_clip's tower has layers 1 to {num_blocks}: name one of them"
        )
    return block


def open_open_clip_llava(files: VisionFiles) -> OpenClipLlavaVision:
    """Open `LlavaForConditionalGeneration` whose tower is open_clip's."""
    settings = _read_settings(files)
    model_cfg = _model_cfg(settings)
    tower = model_cfg["vision_cfg"]
    # transformers knows no such tower: for all else in the config, one of its own of that shape stands for it.
    shape = {"hidden_size": tower.width, "image_size": tower.image_size, "patch_size": tower.patch_size}
    stand_in = {"model_type": "clip_vision_model", "num_attention_heads": 1, **shape}
    config = model_config(LlavaConfig, files, vision_config=stand_in)
    check_token(files.encode_text, IMAGE_TOKEN, config.image_token_id)
    processor = OpenClipProcessor(settings.get("preprocess_cfg", {}))
    check_processed_size(processor, tower.image_size)
    module = without_weights(lambda: _OpenClipLlava(model_cfg, config))
    described = {**config.to_dict(), "vision_config": settings}
    return OpenClipLlavaVision(load_tower(module, described, processor, files), config)


def _read_settings(files: VisionFiles) -> dict[str, Any]:
    path = files.folder / CONFIG_FILE
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(
            f"open_clip's settings can't be read from {path} ({error}): a tower of open_clip's needs them"
        ) from error
    if not isinstance(settings, dict) or not isinstance(settings.get("model_cfg"), dict):
        raise UnsupportedModelError(f"{path} has no model_cfg: it must be as open_clip writes it")
    return settings


def _model_cfg(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What `open_clip.CLIP` is made of, but for its text part."""
    given = {key: value for key, value in settings["model_cfg"].items() if key in ("embed_dim", "quick_gelu")}
    try:
        tower = open_clip.CLIPVisionCfg(**settings["model_cfg"]["vision_cfg"])
    except (KeyError, TypeError) as error:
        raise UnsupportedModelError(f"open_clip refuses its vision_cfg ({error}): mend {CONFIG_FILE}") from error
    sizes = (tower.layers, tower.width, tower.image_size, tower.patch_size)
    if tower.timm_model_name or not all(isinstance(size, int) for size in sizes):
        raise UnsupportedModelError(
            f"open_clip's tower has layers, width, image_size and patch_size {sizes}, and timm_model_name "
            f"{tower.timm_model_name!r}: only its own vision transformers for squares are served"
        )
    return {**given, "vision_cfg": tower}


class OpenClipLlavaVision(TowerVision):
    """All images become squares of the same size, and the same number of tokens."""

    def __init__(self, tower: Tower, config: Any) -> None:
        super().__init__(tower, IMAGE_TOKEN, config.image_token_id, config.text_config.hidden_size)
        num_patches = (config.vision_config.image_size // config.vision_config.patch_size) ** 2
        count = num_patches + int(config.vision_feature_select_strategy != "default")
        self._layout = ImageLayout.of([self.placeholder_id] * count, self.placeholder_id)

    def layout(self, width: int, height: int) -> ImageLayout:
        """See `VisionModel`."""
        return self._layout

    def _embed(self, images: Sequence[DecodedImage], inputs: Sequence[Mapping[str, Any]]) -> Sequence[Tensor]:
        embeddings: Tensor = self._tower.module(torch.cat([self._tower.pixels(of_image) for of_image in inputs]))
        return embeddings.unbind()

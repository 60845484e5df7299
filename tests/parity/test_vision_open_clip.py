"""Embeddings of a LLaVA with a tower of open_clip's, against open_clip's tower and transformers' projector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from safetensors.torch import load_file
from tiny_open_clip import PREPROCESS, random_clip, write_tiny_open_clip_llava
from tiny_vision import open_tiny_vlm, picture
from torch import Tensor, nn

from mlserve.vision.image import DecodedImage

CASES: dict[str, dict[str, Any]] = {
    "second-to-last": {"vision_feature_layer": -2},
    "last": {"vision_feature_layer": -1},
    "counted-from-the-first": {"vision_feature_layer": 1},
    "two-layers": {"vision_feature_layer": [3, -2]},
    "class-token": {"vision_feature_select_strategy": "full"},
    "gelu": {"quick_gelu": False},
    "no-first-norm": {"tower": {"no_ln_pre": True}},
    "squash": {"preprocess": {"resize_mode": "squash", "interpolation": "bilinear"}},
    "bars": {"preprocess": {"resize_mode": "longest", "fill_color": 99}},
}
IMAGES = [picture(*size) for size in ((28, 28), (40, 61), (200, 90), (3, 50))]


def reference(folder: Path, image: DecodedImage, options: dict[str, Any]) -> Tensor:
    """Every block's output is taken by a hook, on the way of open_clip's own forward pass."""
    visual = random_clip(quick_gelu=options.get("quick_gelu", True), **options.get("tower", {})).visual
    outputs: list[Tensor] = []
    for block in visual.transformer.resblocks:
        block.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    transform = image_transform_v2(PreprocessCfg(**{**PREPROCESS, **options.get("preprocess", {})}), is_train=False)
    tensors = load_file(folder / "model.safetensors")
    with torch.no_grad():
        visual(transform(image.to_pil())[None])
        layers = options.get("vision_feature_layer", -2)
        features = [[None, *outputs][i] for i in ([layers] if isinstance(layers, int) else layers)]
        x = torch.cat([part[0] for part in features if part is not None], dim=-1)
        if options.get("vision_feature_select_strategy") != "full":
            x = x[1:]
        for i in (1, 2):
            weight, bias = (tensors[f"multi_modal_projector.linear_{i}.{name}"] for name in ("weight", "bias"))
            x = nn.functional.linear(x, weight, bias)
            x = nn.functional.gelu(x) if i == 1 else x
    return x


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_embeddings(options: dict[str, Any], tmp_path: Path) -> None:
    folder = write_tiny_open_clip_llava(tmp_path, **options)
    vision = open_tiny_vlm(folder)
    for image, found in zip(IMAGES, vision.encode(IMAGES), strict=True):
        expected = reference(folder, image, options)
        assert float(expected.std()) > 0.1
        assert len(found) == vision.layout(image.width, image.height).num_embeddings
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tiny import IMAGE
from tiny_open_clip import write_tiny_open_clip_llava
from tiny_vision import open_tiny_vlm

from mlserve.errors import UnsupportedModelError


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "open_clip_config.json"
    settings = json.loads(path.read_text())
    settings["model_cfg"]["vision_cfg"] |= changes
    path.write_text(json.dumps(settings))


def test_layout(tmp_path: Path) -> None:
    vision = open_tiny_vlm(write_tiny_open_clip_llava(tmp_path))
    assert vision.layout(300, 20).token_ids == (IMAGE,) * 16
    assert vision.layout(300, 20).embedded == ((0, 16),)
    assert vision.image_token == "<image>"
    assert vision.hidden_size == 64


def test_digest_depends_on_settings(tmp_path: Path) -> None:
    digests = [
        open_tiny_vlm(write_tiny_open_clip_llava(tmp_path / str(i), **options)).digest
        for i, options in enumerate(({}, {"quick_gelu": False}, {"preprocess": {"fill_color": 1}}, {}))
    ]
    assert digests[0] == digests[3]
    assert len(set(digests)) == 3


def test_layers_behind_the_features_may_be_missing(tmp_path: Path) -> None:
    folder = write_tiny_open_clip_llava(tmp_path)
    expected = open_tiny_vlm(folder)
    tensors = load_file(folder / "model.safetensors")
    kept = {n: t for n, t in tensors.items() if n != "vision_tower.proj" and not n.startswith("vision_tower.ln_post")}
    assert len(kept) == len(tensors) - 3
    save_file(kept, folder / "model.safetensors")
    assert open_tiny_vlm(folder).digest == expected.digest


@pytest.mark.parametrize("layer", [0, 4, -4])
def test_layers_that_are_not_there(layer: int, tmp_path: Path) -> None:
    folder = write_tiny_open_clip_llava(tmp_path, vision_feature_layer=layer)
    with pytest.raises(UnsupportedModelError, match=f"vision_feature_layer is {layer}, .* has layers 1 to 3"):
        open_tiny_vlm(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"timm_model_name": "vit_tiny_patch16_224"}, "timm_model_name 'vit_tiny_patch16_224'"),
        ({"layers": [3, 4, 6, 3]}, "only its own vision transformers"),
        ({"image_size": [28, 56]}, "only its own vision transformers"),
        ({"colour": "red"}, "open_clip refuses its vision_cfg .*colour"),
    ],
    ids=["timm", "resnet", "oblong", "unknown"],
)
def test_other_towers_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write_tiny_open_clip_llava(tmp_path)
    edit(folder, **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        open_tiny_vlm(folder)


def test_missing_settings(tmp_path: Path) -> None:
    folder = write_tiny_open_clip_llava(tmp_path)
    (folder / "open_clip_config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match="has no model_cfg"):
        open_tiny_vlm(folder)
    (folder / "open_clip_config.json").unlink()
    with pytest.raises(UnsupportedModelError, match="settings can't be read"):
        open_tiny_vlm(folder)


def test_pixels_that_do_not_fit(tmp_path: Path) -> None:
    folder = write_tiny_open_clip_llava(tmp_path, preprocess={"size": 35})
    with pytest.raises(UnsupportedModelError, match=r"makes \[35, 35\] pixels .* takes \[28, 28\]"):
        open_tiny_vlm(folder)

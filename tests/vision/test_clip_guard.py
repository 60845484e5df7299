"""The guard by meaning, with an open_clip model of random weights."""

from __future__ import annotations

from pathlib import Path

import open_clip
import pytest
import torch
from pictures import photographs, random_picture
from PIL import Image
from tiny_open_clip import random_clip, write_clip
from torch import Tensor

from mlserve import ConfigError
from mlserve.vision.clip_guard import ClipGuard, load_clip_guard
from mlserve.vision.guards import ThumbnailGuard
from mlserve.vision.hashes import shrink
from mlserve.vision.identity import get_image_identity
from mlserve.vision.image import load_image
from mlserve.vision.perceptual import PerceptualIdentity


class ColourModel:
    """Embeds an image as its mean colour."""

    def __init__(self) -> None:
        self.num_calls = 0

    def encode_image(self, image: Tensor) -> Tensor:
        self.num_calls += 1
        return image.mean((2, 3))


def to_tensor(image: Image.Image) -> Tensor:
    return torch.tensor(list(image.resize((8, 8)).tobytes()), dtype=torch.float64).reshape(8, 8, 3).permute(2, 0, 1)


def test_cosines_decide() -> None:
    guard = ClipGuard(ColourModel(), to_tensor, min_cosine=0.9)
    colours = [(100, 0, 0), (200, 0, 0), (200, 50, 0), (100, 100, 0)]
    images = [load_image(Image.new("RGB", (40, 40), colour)) for colour in colours]
    features = [guard.features(image, shrink(image)) for image in images]
    assert [guard.confirms(features[0], other) for other in features] == [True, True, True, False]
    assert features[3].tolist() == pytest.approx([0.5**0.5, 0.5**0.5, 0])
    assert ClipGuard(ColourModel(), to_tensor, min_cosine=1.0).confirms(features[2], features[2])
    assert not guard.confirms(features[0], features[0] * float("nan"))


def test_a_model_of_open_clip() -> None:
    torch.manual_seed(0)
    vision = {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8}
    text = {"context_length": 8, "vocab_size": 16, "width": 16, "heads": 2, "layers": 1}
    model = open_clip.model.CLIP(embed_dim=24, vision_cfg=vision, text_cfg=text).eval()
    guard = ClipGuard(model, open_clip.image_transform(32, is_train=False), min_cosine=0.99)
    image = load_image(photographs()["astronaut"])
    features = guard.features(image, shrink(image))
    assert features.shape == (24,)
    assert float(features @ features) == pytest.approx(1)
    other = load_image(random_picture(0))
    assert guard.confirms(features, guard.features(load_image(image.to_pil().resize((256, 256))), shrink(image)))
    assert not guard.confirms(features, guard.features(other, shrink(other)))


def test_beside_the_thumbnail() -> None:
    model = ColourModel()
    identity = PerceptualIdentity(guards=[ThumbnailGuard(), ClipGuard(model, to_tensor, min_cosine=0.9999)])
    first = photographs()["china"]
    red, green, blue = first.split()
    warmer = Image.merge("RGB", (red.point([min(value + 9, 255) for value in range(256)]), green, blue))
    for image, near in ((first, False), (first.resize((320, 213)), True), (warmer, False)):
        assert identity.identify(load_image(image)).is_near is near
    assert model.num_calls == 3
    identity.identify(load_image(first))  # equal pixels: nothing is encoded
    assert model.num_calls == 3


@pytest.mark.parametrize("cosine", [0, 1.01, -0.5])
def test_cosines_out_of_range(cosine: float) -> None:
    with pytest.raises(ConfigError, match=f"min_cosine is {cosine}: give a number above 0, at most 1"):
        ClipGuard(ColourModel(), to_tensor, min_cosine=cosine)


def test_a_folder_of_open_clip_makes_a_guard(tmp_path: Path) -> None:
    clip = random_clip()
    write_clip(tmp_path, clip)
    image = load_image(random_picture(1))
    features = load_clip_guard(tmp_path).features(image, shrink(image))
    _, preprocess = open_clip.create_model_from_pretrained(f"local-dir:{tmp_path}")
    with torch.inference_mode():
        expected = torch.nn.functional.normalize(clip.encode_image(preprocess(image.to_pil())[None])[0], dim=0)
    assert torch.allclose(torch.from_numpy(features), expected, atol=1e-6)
    identity = get_image_identity("perceptual", clip=str(tmp_path))
    assert [type(guard) for guard in identity.guards] == [ThumbnailGuard, ClipGuard]


def test_a_broken_model_is_refused(tmp_path: Path) -> None:
    write_clip(tmp_path, random_clip())
    (tmp_path / "open_clip_model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="can't be loaded"):
        load_clip_guard(tmp_path)

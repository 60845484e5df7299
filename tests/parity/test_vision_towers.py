"""Embeddings and layouts of tiny random models with images against transformers, in float32, for every family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from tiny_vision import TINY_FAMILIES, open_tiny_vlm, picture, write_tiny_vlm
from torch import Tensor

from mlserve.model.checkpoint import read_json
from mlserve.vision.encoder import VisionModel
from mlserve.vision.image import DecodedImage

ATOL = 1e-5
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": ("llava", {}),
    "llava-last-layer-full": ("llava", {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}),
    "llava-two-layers": ("llava", {"vision_feature_layer": [1, -1]}),
    "llava-no-bias": ("llava", {"multimodal_projector_bias": False, "projector_hidden_act": "silu"}),
    "llava-siglip": ("llava-siglip", {}),
    "llava-next": ("llava-next", {}),
    "llava-next-last-layer": ("llava-next", {"vision_feature_layer": -1}),
    "idefics3": ("idefics3", {}),
    "idefics3-no-shuffle": ("idefics3", {"scale_factor": 1}),
    "smolvlm": ("smolvlm", {}),
    "qwen2-vl": ("qwen2-vl", {}),
    "qwen2.5-vl": ("qwen2.5-vl", {}),
    "qwen2.5-vl-large-windows": ("qwen2.5-vl", {"vision_config": {"window_size": 32, "depth": 3}}),
    "gemma3": ("gemma3", {}),
    "gemma3-not-averaged": ("gemma3", {"mm_tokens_per_image": 16}),
}
SIZES = [(28, 28), (40, 61), (200, 90), (3, 50), (70, 1), (1, 120), (64, 64)]  # width, height


class Reference:
    """A folder as transformers sees it."""

    def __init__(self, folder: Path) -> None:
        self.config = read_json(folder / "config.json")
        model_class = getattr(transformers, self.config["architectures"][0])
        self.model = model_class.from_pretrained(folder, dtype=torch.float32)
        self.processor = self._processor(folder)

    def _processor(self, folder: Path) -> Any:
        if not self.config["architectures"][0].startswith("SmolVLM"):
            return transformers.AutoProcessor.from_pretrained(folder)
        # Its own, which does the same for images, wants a package that spells numbers, for videos.
        return transformers.Idefics3Processor(
            image_processor=transformers.AutoImageProcessor.from_pretrained(folder),
            tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
            image_seq_len=read_json(folder / "processor_config.json")["image_seq_len"],
        )

    def inputs(self, text: str, images: list[DecodedImage]) -> Any:
        pictures = [Image.fromarray(image.pixels) for image in images]
        return self.processor(text=text, images=pictures, return_tensors="pt", add_special_tokens=False)

    def embeddings(self, inputs: Any) -> Tensor:
        """Of all images of a prompt, one after the other."""
        names = ("pixel_values", "pixel_attention_mask", "image_sizes", "image_grid_thw")
        arguments = {name: inputs[name] for name in names if name in inputs}
        with torch.no_grad():
            found = self.model.model.get_image_features(**arguments).pooler_output
        return torch.cat([part.reshape(-1, part.shape[-1]) for part in found])


Opened = tuple[VisionModel, Reference]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Opened]:
    made: dict[str, Opened] = {}

    def make_case(case: str) -> Opened:
        if case not in made:
            family, overrides = CASES[case]
            folder = write_tiny_vlm(tmp_path_factory.mktemp(case), family, **overrides)
            made[case] = open_tiny_vlm(folder), Reference(folder)
        return made[case]

    return make_case


def check(vision: VisionModel, reference: Reference, images: list[DecodedImage]) -> None:
    expected = reference.embeddings(reference.inputs(vision.image_token * len(images), images))
    found = vision.encode(images)
    assert [len(part) for part in found] == [vision.layout(i.width, i.height).num_embeddings for i in images]
    assert all(part.shape[1] == vision.hidden_size and part.dtype == torch.float32 for part in found)
    assert float(expected.std()) > 0.1  # flat embeddings would agree with anything
    torch.testing.assert_close(torch.cat(found), expected, atol=ATOL, rtol=1e-5)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_one_image(case: str, size: tuple[int, int], make: Callable[[str], Opened]) -> None:
    check(*make(case), [picture(*size)])


@pytest.mark.parametrize("case", CASES)
def test_several_images(case: str, make: Callable[[str], Opened]) -> None:
    check(*make(case), [picture(*size) for size in SIZES] + [picture(40, 61, seed=1)])


@pytest.mark.parametrize("case", CASES)
def test_images_computed_together_and_alone(case: str, make: Callable[[str], Opened]) -> None:
    vision, _ = make(case)
    images = [picture(40, 61), picture(40, 61, seed=1), picture(200, 90)]
    together = vision.encode(images)
    for image, expected in zip(images, together, strict=True):
        [alone] = vision.encode([image])
        torch.testing.assert_close(alone, expected, atol=ATOL, rtol=1e-5)
    assert (together[0] - together[1]).abs().max() > 0.01


@pytest.mark.parametrize("case", CASES)
def test_prompt(case: str, make: Callable[[str], Opened]) -> None:
    """The prompt that transformers' processor makes, with two images between texts."""
    vision, reference = make(case)
    images = [picture(40, 61), picture(200, 90)]
    texts = ["user\nOne: ", " and two: ", " end"]
    expected = reference.inputs(vision.image_token.join(texts), images)["input_ids"][0].tolist()
    encode = reference.processor.tokenizer.encode
    before, after = vision.surrounding_text
    ids: list[int] = []
    for i, text in enumerate(texts):
        ids += encode((after if i else "") + text + (before if i < len(images) else ""), add_special_tokens=False)
        if i < len(images):
            layout = vision.layout(images[i].width, images[i].height)
            assert all(layout.token_ids[j] == vision.placeholder_id for a, b in layout.embedded for j in range(a, b))
            ids += layout.token_ids
    assert ids == expected


def test_all_tiny_families_are_here() -> None:
    assert {family for family, _ in CASES.values()} == set(TINY_FAMILIES)

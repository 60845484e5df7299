"""What holds for the vision part of every family: how it is found, checked and told from others."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import write_tiny
from tiny_vision import TINY_FAMILIES, open_tiny_vlm, picture, write_tiny_vlm
from torch import Tensor
from tree import run_python

from mlserve.errors import CorruptWeightsError, UnsupportedModelError
from mlserve.model.checkpoint import Checkpoint
from mlserve.vision.encoder import ImageLayout, VisionModel
from mlserve.vision.families import VISION_FAMILIES, open_vision

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> VisionModel:
    return open_tiny_vlm(write_tiny_vlm(tmp_path_factory.mktemp("llava"), "llava"))


@contextmanager
def edited(folder: Path, file: str) -> Iterator[dict[str, Any]]:
    content = json.loads((folder / file).read_text())
    yield content
    (folder / file).write_text(json.dumps(content))


@contextmanager
def edited_tensors(folder: Path) -> Iterator[Tensors]:
    tensors = load_file(folder / "model.safetensors")
    yield tensors
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_every_family_has_a_tiny_model() -> None:
    assert {family.architecture for family in TINY_FAMILIES.values()} == set(VISION_FAMILIES)


def test_layout_finds_placeholders() -> None:
    layout = ImageLayout.of([7, 9, 9, 7, 7, 9], 9)
    assert layout.embedded == ((1, 3), (5, 6))
    assert layout.num_embeddings == 3
    assert layout.token_ids == (7, 9, 9, 7, 7, 9)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_tensor_names_are_those_of_the_vision_part(family: str, tmp_path: Path) -> None:
    """And the language part is what remains: a plain language model's tensors but for their prefixes."""
    folder = write_tiny_vlm(tmp_path, family)
    rest = set(load_file(folder / "model.safetensors")) - open_tiny_vlm(folder).tensor_names
    names = {re.sub(r"^(language_model\.)?(model\.)?(text_model\.)?", "", name) for name in rest}
    assert "embed_tokens.weight" in names
    assert all(re.match(r"(layers\.[01]|embed_tokens|norm|lm_head)\.", name) for name in names)
    assert len(names) == len(rest)


def respelled(name: str) -> str:
    """As other versions of transformers write it."""
    if name.startswith("model."):
        return name.removeprefix("model.")
    name = name.replace("vision_tower.", "vision_tower.vision_model.")
    return name if name.startswith("vision_tower.") else f"model.{name}"


@pytest.mark.parametrize("respell", [respelled, lambda name: f"model.{respelled(name).removeprefix('model.')}"])
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_other_spellings_of_tensors(family: str, respell: Callable[[str], str], tmp_path: Path) -> None:
    folder = write_tiny_vlm(tmp_path, family)
    expected = open_tiny_vlm(folder)
    with edited_tensors(folder) as tensors:
        for name in expected.tensor_names:
            tensors[respell(name)] = tensors.pop(name)
    found = open_tiny_vlm(folder)
    assert found.digest == expected.digest
    assert found.tensor_names == {respell(name) for name in expected.tensor_names}
    [embeddings], [same] = (vision.encode([picture(40, 61)]) for vision in (found, expected))
    assert embeddings.equal(same)


def test_tensors_without_influence_are_ignored(tmp_path: Path) -> None:
    folder = write_tiny_vlm(tmp_path, "llava-siglip")
    digest = open_tiny_vlm(folder).digest
    with edited_tensors(folder) as tensors:
        heads = [name for name in tensors if name.startswith("vision_tower.head.")]
        for name in heads:
            del tensors[name]
        tensors["vision_tower.vision_model.embeddings.position_ids"] = torch.zeros(1, 16)
    assert len(heads) > 5
    assert open_tiny_vlm(folder).digest == digest


def test_missing_tensor(tmp_path: Path) -> None:
    folder = write_tiny_vlm(tmp_path, "llava")
    with edited_tensors(folder) as tensors:
        del tensors["multi_modal_projector.linear_2.bias"]
    with pytest.raises(CorruptWeightsError, match=r"multi_modal_projector.linear_2.bias \[64\] is missing"):
        open_tiny_vlm(folder)


def test_misshapen_tensor(tmp_path: Path) -> None:
    folder = write_tiny_vlm(tmp_path, "llava")
    with edited_tensors(folder) as tensors:
        tensors["vision_tower.pre_layrnorm.bias"] = torch.zeros(31)
    with pytest.raises(
        CorruptWeightsError, match=r"pre_layrnorm.bias has shape \[31\], but the config asks for \[32\]"
    ):
        open_tiny_vlm(folder)


def test_unknown_tensor(tmp_path: Path) -> None:
    folder = write_tiny_vlm(tmp_path, "qwen2-vl")
    with edited_tensors(folder) as tensors:
        tensors["visual.blocks.2.norm1.weight"] = torch.zeros(32)
    with pytest.raises(CorruptWeightsError, match=r"visual.blocks.2.norm1.weight is unknown"):
        open_tiny_vlm(folder)


def test_weights_that_are_no_numbers(tmp_path: Path) -> None:
    folder = write_tiny_vlm(tmp_path, "gemma3")
    with edited_tensors(folder) as tensors:
        tensors["multi_modal_projector.mm_soft_emb_norm.weight"][3] = float("inf")
    with pytest.raises(CorruptWeightsError, match=r"mm_soft_emb_norm.weight has values that are not finite"):
        open_tiny_vlm(folder)


def test_other_architectures(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"'LlamaForCausalLM' is not served with images: use .* Llava"):
        open_tiny_vlm(folder)


def test_other_towers(tmp_path: Path) -> None:
    folder = write_tiny_vlm(tmp_path, "llava")
    with edited(folder, "config.json") as config:
        config["vision_config"] = {"model_type": "pixtral"}
    with pytest.raises(UnsupportedModelError, match=r"'pixtral' is not served: use .* clip_vision_model"):
        open_tiny_vlm(folder)


def test_quantised_models(tmp_path: Path) -> None:
    folder = write_tiny_vlm(tmp_path, "llava")
    with edited(folder, "config.json") as config:
        config["quantization_config"] = {"quant_method": "awq"}
    with pytest.raises(UnsupportedModelError, match="quantization_config is not served"):
        open_tiny_vlm(folder)


def test_configs_that_transformers_refuses(tmp_path: Path) -> None:
    folder = write_tiny_vlm(tmp_path, "llava")
    with edited(folder, "config.json") as config:
        config["vision_feature_select_strategy"] = "everything"
    with pytest.raises(UnsupportedModelError, match="transformers refuses the model's config"):
        open_tiny_vlm(folder)


@pytest.mark.parametrize("family", ["llava", "idefics3", "qwen2-vl", "gemma3", "llava-next"])
def test_tokenizers_that_do_not_fit(family: str, tmp_path: Path) -> None:
    folder = write_tiny_vlm(tmp_path, family)
    config = json.loads((folder / "config.json").read_text())
    message = r"the tokenizer encodes '<.*>' to \[1, 2\], but the model's config says that it is \d+"
    with pytest.raises(UnsupportedModelError, match=message):
        open_vision(config, folder, Checkpoint(folder), lambda text: [1, 2])


def test_no_image_processor(tmp_path: Path) -> None:
    folder = write_tiny_vlm(tmp_path, "llava")
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(UnsupportedModelError, match="no image processor can be made"):
        open_tiny_vlm(folder)


def test_image_processors_with_code_of_their_own_are_not_run(tmp_path: Path) -> None:
    folder = write_tiny_vlm(tmp_path, "llava")
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    with edited(folder, "preprocessor_config.json") as settings:
        settings["image_processor_type"] = "Evil"
        settings["auto_map"] = {"AutoImageProcessor": "evil.Evil"}
    with pytest.raises(UnsupportedModelError, match=r"no image processor can be made .* custom code"):
        open_tiny_vlm(folder)


def test_image_processor_in_the_processors_file(tmp_path: Path) -> None:
    """Where transformers 5 writes it."""
    folder = write_tiny_vlm(tmp_path, "llava")
    expected = open_tiny_vlm(folder)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").unlink()
    with edited(folder, "processor_config.json") as processor:
        processor["image_processor"] = settings
    assert open_tiny_vlm(folder).digest == expected.digest


@pytest.mark.parametrize(
    "settings", [{"do_center_crop": False}, {"crop_size": {"height": 28, "width": 35}}, {"do_resize": False}], ids=str
)
def test_pixels_that_do_not_fit(settings: dict[str, Any], tmp_path: Path) -> None:
    if not settings.get("do_resize", True):
        settings = {**settings, "do_center_crop": False}
    folder = write_tiny_vlm(tmp_path, "llava", image_processor=settings)
    with pytest.raises(UnsupportedModelError, match=r"but the tower takes \[28, 28\]"):
        open_tiny_vlm(folder)


def test_digests(tmp_path: Path, llava: VisionModel) -> None:
    """Of the same model it is the same; every change that reaches embeddings changes it, and no other."""

    def digest(name: str, **options: Any) -> bytes:
        return open_tiny_vlm(write_tiny_vlm(tmp_path / name, "llava", **options)).digest

    with_text = write_tiny_vlm(tmp_path / "text", "llava")
    with edited_tensors(with_text) as tensors:
        tensors["language_model.model.norm.weight"] += 1
    assert digest("same") == open_tiny_vlm(with_text).digest == llava.digest
    changed = [
        digest("weights", seed=1),
        digest("layer", vision_feature_layer=-1),
        digest("colours", image_processor={"image_mean": [0.5, 0.5, 0.5]}),
        open_tiny_vlm(tmp_path / "same", dtype=torch.bfloat16).digest,
    ]
    assert len({llava.digest, *changed}) == 5
    assert len(llava.digest) == 16


def test_nothing_to_encode(llava: VisionModel) -> None:
    assert llava.encode([]) == []


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_bfloat16(family: str, tmp_path: Path) -> None:
    """Embeddings are float32 whatever they are computed in, and near to those computed in float32."""
    folder = write_tiny_vlm(tmp_path, family)
    image = picture(40, 61)
    [rounded] = open_tiny_vlm(folder, dtype=torch.bfloat16).encode([image])
    [exact] = open_tiny_vlm(folder).encode([image])
    assert rounded.dtype == torch.float32
    error = (rounded - exact).norm() / exact.norm()
    assert 0 < error < 0.03


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_dtype_in_the_config_is_that_of_storage_only(family: str, tmp_path: Path) -> None:
    folder = write_tiny_vlm(tmp_path, family)
    [expected] = open_tiny_vlm(folder).encode([picture(40, 61)])
    with edited(folder, "config.json") as config:
        for part in (config, config["vision_config"], config["text_config"]):
            part.pop("dtype", None)
            part["torch_dtype"] = "bfloat16"
    [found] = open_tiny_vlm(folder).encode([picture(40, 61)])
    assert found.equal(expected)


@pytest.mark.gpu
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_on_a_gpu(family: str, tmp_path: Path) -> None:
    folder = write_tiny_vlm(tmp_path, family)
    images = [picture(40, 61), picture(90, 30)]
    on_gpu = open_tiny_vlm(folder, device=torch.device("cuda")).encode(images)
    for found, expected in zip(on_gpu, open_tiny_vlm(folder).encode(images), strict=True):
        assert found.device.type == "cuda"
        torch.testing.assert_close(found.cpu(), expected, atol=1e-3, rtol=1e-3)


def test_transformers_is_imported_late() -> None:
    code = "import sys, mlserve.vision.encoder, mlserve.vision.families; print('transformers' in sys.modules)"
    result = run_python(code)
    assert result.stdout.strip() == "False", result.stderr

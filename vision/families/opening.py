"""Opening a checkpoint's vision part: its config, its image processor, and its weights in transformers' own modules."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import xxhash
from PIL import Image
from torch import nn

from mlserve.errors import CorruptWeightsError, UnsupportedModelError
from mlserve.vision.encoder import TensorSource, TextEncoder

__all__ = ["Tower", "VisionFiles", "load_tower", "model_config", "open_processor", "without_language_part"]

# Parts of a checkpoint that are about images, whatever the family.
_VISION_NAME = re.compile(
    r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|connector|image_newline)(\.|$)"
)
# Stored by some checkpoints and without any influence on embeddings: buffers that are computed anew, and the layers
# behind the patches' last hidden states.
_UNUSED_NAME = re.compile(r".*\.position_ids|(model\.)?vision_tower\.((vision_model\.)?head\..*|proj|ln_post\..*)")
# Where transformers 4 and 5 put what the modules call by the shorter name.
_SPELLINGS: tuple[Callable[[str], str], ...] = (
    lambda name: name,
    lambda name: f"model.{name}",
    lambda name: name.replace("vision_tower.", "vision_tower.vision_model.", 1),
    lambda name: "model." + name.replace("vision_tower.", "vision_tower.vision_model.", 1),
)


@dataclass(frozen=True, slots=True)
class VisionFiles:
    """What a vision part is opened from, and how it is to be computed."""

    config: Mapping[str, Any]  # config.json
    folder: Path  # with the image processor's settings
    tensors: TensorSource
    encode_text: TextEncoder
    device: torch.device
    dtype: torch.dtype  # of weights and of what is computed between pixels and embeddings


@dataclass(frozen=True, slots=True)
class Tower:
    """Modules with their weights, and the image processor that feeds them."""

    module: Any  # a transformers or open_clip module
    processor: Any  # a transformers image processor
    device: torch.device
    dtype: torch.dtype
    digest: bytes
    tensor_names: frozenset[str]

    def pixels(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """An image processor's `pixel_values` as the modules want them."""
        pixels: torch.Tensor = inputs["pixel_values"]
        return pixels.to(self.device, self.dtype)


def model_config(config_class: Any, files: VisionFiles, **overrides: Any) -> Any:
    """The model's config with the defaults of its class filled in. Raises `UnsupportedModelError`."""
    if files.config.get("quantization_config"):
        raise UnsupportedModelError(
            "the setting quantization_config is not served for models with images: use a model without it"
        )
    try:
        return config_class(**{**files.config, **overrides})
    except Exception as error:  # which one depends on the setting and on transformers' version
        raise UnsupportedModelError(f"transformers refuses the model's config ({error}): mend config.json") from error


def open_processor(folder: Path) -> Any:
    """The image processor whose settings are in the folder. Raises `UnsupportedModelError`."""
    try:
        return transformers.AutoImageProcessor.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # which one depends on what is missing and on transformers' version
        raise UnsupportedModelError(
            f"no image processor can be made from {folder} ({error}): it must hold the model's preprocessor_config.json"
        ) from error


def check_processed_size(processor: Any, side: int) -> None:
    """Raise `UnsupportedModelError` unless the processor makes squares of `side` pixels of images of any shape."""
    for width, height in ((3 * side, side), (1, 2)):
        pixels = processor(images=Image.new("RGB", (width, height)), return_tensors="pt")["pixel_values"]
        if tuple(pixels.shape[-2:]) != (side, side):
            raise UnsupportedModelError(
                f"the image processor makes {list(pixels.shape[-2:])} pixels of {[height, width]}, but the tower takes "
                f"{[side, side]}: preprocessor_config.json and config.json are of different models"
            )


def without_language_part(model_class: Any, config: Any, language_part: str) -> nn.Module:
    """A transformers model without weights, and without the submodule named `language_part`.

    The language model is built from a config of next to nothing, and then dropped: what is left has transformers' own
    way from pixels to embeddings.
    """
    hidden_size = config.text_config.hidden_size
    config.text_config = transformers.LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=1,
        num_attention_heads=1,
        num_hidden_layers=0,
        vocab_size=1,
        bos_token_id=None,
        eos_token_id=None,
    )
    module = without_weights(lambda: model_class(config))
    delattr(module, language_part)
    return module


def without_weights(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a module whose weights are read later: no time is spent on random ones."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        return build().eval()


def load_tower(
    module: nn.Module, settings: Mapping[str, Any], processor: Any, files: VisionFiles, prefix: str = ""
) -> Tower:
    """Read a module's weights from the checkpoint, where their names begin with `prefix`.

    settings: the model's config, by which the digest tells it from others.

    Raises `CorruptWeightsError` naming the first tensor that is missing, misshapen, unknown or not finite.
    """
    source = files.tensors
    wanted = {key: tuple(value.shape) for key, value in module.state_dict().items()}
    names = {key: _stored_name(prefix + key, shape, source) for key, shape in wanted.items()}
    _refuse_unknown(source, frozenset(names.values()))
    of_images = {key: value for key, value in settings.items() if key not in ("text_config", "transformers_version")}
    described = [transformers.__version__, str(files.dtype), of_images, type(processor).__name__, processor.to_dict()]
    digest = xxhash.xxh3_128(json.dumps(described, sort_keys=True).encode())
    state = {}
    for key, name in names.items():
        state[key] = _finite(name, source.read(name).to(files.dtype))
        digest.update(key.encode())
        digest.update(state[key].reshape(-1).view(torch.uint8).numpy().data)
    module.load_state_dict(state, assign=True)
    module.to(files.device)  # the dtype is left alone: buffers such as rotary frequencies are float32 whatever it is
    module.requires_grad_(False)
    tensor_names = frozenset(name for name in source.shapes if _VISION_NAME.match(name))
    return Tower(module, processor, files.device, files.dtype, digest.digest(), tensor_names)


def _stored_name(key: str, shape: tuple[int, ...], source: TensorSource) -> str:
    for spelling in _SPELLINGS:
        name = spelling(key)
        found = source.shapes.get(name)
        if found == shape:
            return name
        if found is not None:
            raise CorruptWeightsError(
                f"tensor {name} has shape {list(found)}, but the config asks for {list(shape)}: "
                "weights and config are of different models"
            )
    raise CorruptWeightsError(f"tensor {key} {list(shape)} is missing: download the model again")


def _refuse_unknown(source: TensorSource, used: frozenset[str]) -> None:
    for name in source.shapes:
        if _VISION_NAME.match(name) and name not in used and not _UNUSED_NAME.fullmatch(name):
            raise CorruptWeightsError(
                f"tensor {name} is unknown to the config's vision part: weights and config are of different models"
            )


def _finite(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.sum(dtype=torch.float32).isfinite():
        raise CorruptWeightsError(
            f"tensor {name} has values that are not finite numbers in {tensor.dtype}: download the model again, or "
            "load it in another dtype"
        )
    return tensor

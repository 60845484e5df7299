"""The language part of a vision-language checkpoint: its config, and its tensors under a language model's names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mlserve.model.settings import wrong_setting
from mlserve.model.weights import TensorSource

__all__ = ["TextTensors", "text_config"]

# Architecture of the language part by its own model_type, where text_config doesn't name it.
_TEXT_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_vl": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
# Where the language part stands in a checkpoint, as transformers 4 and 5 write it, and what it is called on its own.
_RENAMED = (
    (re.compile(r"(?:model\.)?language_model\.lm_head\."), "lm_head."),
    (re.compile(r"language_model\.model\."), "model."),
    (re.compile(r"model\.(?:language_model|text_model)\."), "model."),
)
_TEXT_NAME = re.compile(r"lm_head\.|model\.(?:layers|embed_tokens|norm)\.")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of a checkpoint's language part; of a checkpoint that has no other, `config` itself."""
    if not any(key in config for key in ("vision_config", "text_config")):
        return config
    own = config.get("text_config", config)  # early Qwen2-VL configs have it at the top
    if not isinstance(own, Mapping):
        raise wrong_setting("text_config", own, "an object")
    model_type = own.get("model_type")
    if model_type not in _TEXT_ARCHITECTURES:
        raise wrong_setting("text_config.model_type", model_type, f"one of {', '.join(_TEXT_ARCHITECTURES)}")
    tied = config.get("tie_word_embeddings", own.get("tie_word_embeddings"))
    architectures = [_TEXT_ARCHITECTURES[model_type]]
    return {**own, "architectures": architectures} | ({} if tied is None else {"tie_word_embeddings": tied})


class TextTensors:
    """A checkpoint's language part as a `TensorSource`; the vision part is not in it."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        renamed = {_text_name(name): name for name in source.shapes}
        self._names = {name: original for name, original in renamed.items() if name is not None}
        self.shapes: Mapping[str, tuple[int, ...]] = {n: source.shapes[own] for n, own in self._names.items()}

    def read(self, name: str) -> Tensor:
        """See `TensorSource`."""
        return self._source.read(self._names[name])


def _text_name(name: str) -> str | None:
    for pattern, replacement in _RENAMED:
        if pattern.match(name):
            return pattern.sub(replacement, name, count=1)
    return name if _TEXT_NAME.match(name) else None

"""What a tensor of an adapter's file belongs to, by its key.

PEFT writes `base_model.model.` and the module's path in the model that was trained, which differs from model to model:
`model.layers.0...`, `layers.0...` for a model without its output layer, `model.language_model.layers.0...` inside a
vision-language model. Trainers add parts of their wrappers, and the adapter's name in `lora_A.default.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from mlserve.adapters.spec import LAYER_MODULES, Module, Site

__all__ = ["Key", "Part", "parse_key", "why_unknown"]


class Part(Enum):
    """What a tensor is to its module."""

    A = auto()
    B = auto()
    MAGNITUDE = auto()
    FULL_WEIGHT = auto()  # the base model's own weight, or one that replaces it


@dataclass(frozen=True, slots=True)
class Key:
    """A key that is understood."""

    site: Site
    part: Part
    module_path: str  # in the model that was trained: what the patterns of adapter_config.json are matched with
    adapter: str | None  # the name inside the key


_PREFIX = re.compile(r"base_model\.(?:model\.)?")
# Names that wrappers of training put between those of the model's own modules.
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module"}
# Where the decoder can stand in the model, and the decoder's modules.
_MODULE = re.compile(
    r"(?:model\.)?(?:(?:language_model|text_model)\.)?(?:model\.)?"
    r"(?:layers\.(?P<layer>0|[1-9][0-9]{0,4})\.(?P<block>self_attn|mlp)\.)?(?P<module>[a-z_]+)"
)
_MODULES: Mapping[str, Module] = {module.value: module for module in Module}
_NAME = r"(?:\.(?P<adapter>(?!weight$)[^.]+))?"
_LINEAR_PARTS = (
    (Part.A, re.compile(rf"lora_A{_NAME}\.weight")),
    (Part.B, re.compile(rf"lora_B{_NAME}\.weight")),
    (Part.MAGNITUDE, re.compile(rf"lora_magnitude_vector{_NAME}(?:\.weight)?")),
)
_FULL_WEIGHT = re.compile(r"(?:(?:base_layer|original_module)\.|modules_to_save\.(?:(?P<adapter>[^.]+)\.)?)?weight")
_LM_HEAD_PARTS = (*_LINEAR_PARTS, (Part.FULL_WEIGHT, _FULL_WEIGHT))
_EMBEDDING_PARTS = (
    (Part.A, re.compile(rf"lora_embedding_A{_NAME}")),
    (Part.B, re.compile(rf"lora_embedding_B{_NAME}")),
    _LINEAR_PARTS[2],
    (Part.FULL_WEIGHT, _FULL_WEIGHT),
)
_REASONS = (
    (re.compile(r"lora_B(\.[^.]+)?\.bias$"), "biases of LoRA's own (lora_bias) are not served"),
    (re.compile(r"\.bias$"), "trained biases (bias 'all' or 'lora_only') are not served"),
    (re.compile(r"trainable_tokens"), "trained tokens (trainable_token_indices) are not served"),
    (re.compile(r"\.lora_(E|ranknum)\b"), "AdaLoRA is not served"),
    (re.compile(r"\.lora_diag\b"), "KaSA is not served"),
    (re.compile(r"norm\.weight$"), "trained norms are not served"),
    (re.compile(r"(vision|visual|audio|image)"), "only the language model's modules are served"),
)


def parse_key(key: str) -> Key | None:
    """None if no tensor of that key is served; `why_unknown` has the reason."""
    path = ".".join(part for part in key.split(".") if part not in _WRAPPERS)
    path = path[match.end() :] if (match := _PREFIX.match(path)) else path
    head = _MODULE.match(path)
    if head is None or path[head.end() : head.end() + 1] != ".":
        return None
    site = _site(head["module"], head["block"], head["layer"])
    if site is None:
        return None
    rest = path[head.end() + 1 :]
    for part, pattern in _parts(site.module):
        if match := pattern.fullmatch(rest):
            return Key(site, part, path[: head.end()], match["adapter"])
    return None


def _site(name: str, block: str | None, layer: str | None) -> Site | None:
    module = _MODULES.get(name)
    if module is None or LAYER_MODULES.get(module) != block:
        return None
    return Site(module, None if layer is None else int(layer))


def _parts(module: Module) -> tuple[tuple[Part, re.Pattern[str]], ...]:
    if module is Module.EMBED_TOKENS:
        return _EMBEDDING_PARTS
    return _LM_HEAD_PARTS if module is Module.LM_HEAD else _LINEAR_PARTS


def why_unknown(key: str) -> str:
    """Why `parse_key` knows no place for a key."""
    for pattern, reason in _REASONS:
        if pattern.search(key):
            return reason
    return "the base model has no such module"

"""adapter_config.json: which settings say what the adapter computes, which don't matter, and which aren't served.

Defaults are those of PEFT's LoraConfig. A key that is not listed here is refused unless its value is null, false, empty
or zero: settings that PEFT adds later change what the adapter computes until somebody has looked at them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from mlserve.errors import AdapterError, CorruptAdapterError, UnsupportedAdapterError

__all__ = ["LoraSettings", "parse_config"]

MAX_TOKEN_ID = 2**31
MAX_PATTERNS = 10_000

# Settings of training, initialisation and bookkeeping. fan_in_fan_out is ignored by PEFT itself for linear layers.
_HARMLESS = {
    "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "eva_config", "fan_in_fan_out", "inference_mode",
    "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size", "revision",
    "runtime_config",
}  # fmt: skip
_READ = {
    "alora_invocation_tokens", "alpha_pattern", "ensure_weight_tying", "exclude_modules", "init_lora_weights",
    "layers_pattern", "layers_to_transform", "lora_alpha", "peft_type", "r", "rank_pattern", "target_modules",
    "task_type", "use_dora", "use_rslora",
}  # fmt: skip
_TRAIN_WITHOUT = "train without it"
_REFUSED = {
    "arrow_config": "Arrow's routing between adapters is not served",
    "kasa_config": "KaSA changes the base model's weights and is not served",
    "layer_replication": "the base model's layers are not repeated",
    "lora_bias": "biases of LoRA's own are not served",
    "megatron_config": "Megatron's parallel layers are not served",
    "modules_to_save": "whole modules beside LoRA are not served",
    "monteclora_config": "MonteCLoRA's sampled weights are not served",
    "target_parameters": "LoRA on parameters without a module is not served",
    "trainable_token_indices": "trained tokens are not served",
    "use_bdlora": "BD-LoRA's block-diagonal matrices are not served",
    "use_qalora": "QALoRA's pooled inputs are not served",
    "velora_config": "VeLoRA is not served",
}
_TASKS = (None, "CAUSAL_LM", "FEATURE_EXTRACTION")
# Ways to initialise that leave the base model as it is. `true` and `false` too.
_INITS = ("gaussian", "eva", "orthogonal", "mica")
# These take a part out of the base model's weights, and again when PEFT loads the adapter.
_INITS_CHANGING_THE_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """What adapter_config.json says about the computation, checked for types and ranges."""

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]  # from patterns of module paths, see targets.py
    alpha_pattern: Mapping[str, float]
    use_rslora: bool
    use_dora: bool
    invocation_tokens: tuple[int, ...] | None
    target_modules: str | tuple[str, ...] | None  # a pattern, names, or None: not said
    exclude_modules: str | tuple[str, ...]
    layers_to_transform: tuple[int, ...] | None
    layers_pattern: tuple[str, ...]
    ensure_weight_tying: bool

    def scaling(self, rank: int, alpha: float) -> float:
        """What b @ a is multiplied with."""
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def parse_config(config: Mapping[str, Any]) -> tuple[LoraSettings | None, list[AdapterError]]:
    """The settings, or None if some make no sense; and all that is wrong with them or isn't served."""
    reader = _Reader(config, [])
    peft_type = config.get("peft_type")
    if peft_type != "LORA":
        reader.refuse(f"adapters of type {peft_type!r} are not served: use LoRA (peft_type 'LORA')")
        return None, reader.problems
    invocation_tokens = reader.sizes("alora_invocation_tokens", MAX_TOKEN_ID)
    settings = LoraSettings(
        rank=reader.rank("r", config.get("r", 8)),
        alpha=reader.number("lora_alpha", config.get("lora_alpha", 8)),
        rank_pattern={key: reader.rank("rank_pattern", value) for key, value in reader.pattern("rank_pattern")},
        alpha_pattern={key: reader.number("alpha_pattern", value) for key, value in reader.pattern("alpha_pattern")},
        use_rslora=reader.flag("use_rslora"),
        use_dora=reader.flag("use_dora"),
        invocation_tokens=invocation_tokens or None,  # PEFT takes an empty list for a plain LoRA
        target_modules=reader.names("target_modules"),
        exclude_modules=reader.names("exclude_modules") or (),
        layers_to_transform=reader.sizes("layers_to_transform", MAX_TOKEN_ID) or None,
        layers_pattern=reader.name_list("layers_pattern"),
        ensure_weight_tying=reader.flag("ensure_weight_tying"),
    )
    is_sensible = not reader.problems
    _refuse_unserved(reader, settings)
    return settings if is_sensible else None, reader.problems


def _refuse_unserved(reader: _Reader, settings: LoraSettings) -> None:
    for key, value in reader.config.items():
        if key in _REFUSED and value:
            reader.refuse(f"{key} is set ({_short(value)}): {_REFUSED[key]}, {_TRAIN_WITHOUT}")
        elif key not in _REFUSED and key not in _READ and key not in _HARMLESS and value:
            reader.refuse(
                f"the setting {key} ({_short(value)}) is not known: set it to null if the adapter computes the same "
                "without it"
            )
    if (task := reader.config.get("task_type")) not in _TASKS:
        reader.refuse(f"task_type is {task!r}: only adapters for CAUSAL_LM are served")
    if settings.invocation_tokens is not None and settings.use_dora:
        reader.refuse("alora_invocation_tokens and use_dora are both set, which PEFT doesn't allow either: unset one")
    _refuse_init(reader)


def _refuse_init(reader: _Reader) -> None:
    init = reader.config.get("init_lora_weights", True)
    if init is None or isinstance(init, bool) or init in _INITS:
        return
    if isinstance(init, str) and init.startswith(_INITS_CHANGING_THE_BASE):
        reader.refuse(
            f"init_lora_weights is {init!r}: the adapter is made for base weights that its initialisation changed; "
            "save it as plain LoRA, with path_initial_model_for_weight_conversion"
        )
    else:
        reader.refuse(f"init_lora_weights is {_short(init)}, which is not known: set it to true if it doesn't matter")


@dataclass(frozen=True, slots=True)
class _Reader:
    """Takes values from the config; one that makes no sense is noted, and something sensible returned in its place."""

    config: Mapping[str, Any]
    problems: list[AdapterError]

    def refuse(self, text: str) -> None:
        self.problems.append(UnsupportedAdapterError(text))

    def wrong(self, key: str, value: object, want: str) -> None:
        self.problems.append(CorruptAdapterError(f"{key} is {_short(value)}: it must be {want}"))

    def rank(self, key: str, value: object) -> int:
        if _is_int(value) and value >= 1:
            return value
        self.wrong(key, value, "a whole number from 1")
        return 1

    def number(self, key: str, value: object) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63:  # nor NaN
            return float(value)
        self.wrong(key, value, "a number")
        return 1.0

    def flag(self, key: str) -> bool:
        value = self.config.get(key)
        if value is not None and not isinstance(value, bool):
            self.wrong(key, value, "true or false")
        return value is True

    def pattern(self, key: str) -> list[tuple[str, object]]:
        """The entries of an object."""
        value = self.config.get(key)
        if value is None:
            return []
        if not isinstance(value, dict) or len(value) > MAX_PATTERNS:
            self.wrong(key, value, f"an object of at most {MAX_PATTERNS} entries")
            return []
        return list(value.items())

    def names(self, key: str) -> str | tuple[str, ...] | None:
        """A pattern as it is, or a list of names."""
        value = self.config.get(key)
        return value if value is None or isinstance(value, str) else self.name_list(key)

    def name_list(self, key: str) -> tuple[str, ...]:
        """A list of names, or a single one."""
        value = self.config.get(key)
        if value is None or isinstance(value, str):
            return (value,) if value else ()
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            self.wrong(key, value, "a list of names")
            return ()
        return tuple(value)

    def sizes(self, key: str, limit: int) -> tuple[int, ...] | None:
        """A list of whole numbers from 0, or a single one; None if it isn't there."""
        value = self.config.get(key)
        if value is None:
            return None
        values = value if isinstance(value, list) else [value]
        if not all(_is_int(number) and 0 <= number < limit for number in values):
            self.wrong(key, value, "a list of whole numbers from 0")
            return ()
        return tuple(values)


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _short(value: object) -> str:
    """A value for a message: it comes from a stranger's file and can be of any length."""
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."

"""The families of models that are served: per architecture, how its config.json becomes a `DecoderConfig`.

Defaults for absent keys are those of transformers' config class of that architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlserve.errors import UnsupportedModelError
from mlserve.kernels import Activation
from mlserve.model.config import DecoderConfig, LayerConfig
from mlserve.model.rope import Rope, rope_from_config, rope_from_parameters
from mlserve.model.settings import Settings, wrong_setting

__all__ = ["FAMILIES", "Family", "decoder_config", "family_of"]

MAX_LAYERS = 1024
MAX_HEAD_DIM = 4096
FULL, SLIDING = "full_attention", "sliding_attention"
_ACTIVATIONS = {"silu": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU_TANH}


@dataclass(frozen=True, slots=True)
class Family:
    """One row: what an architecture adds to what all have in common."""

    refine: Callable[[Settings, DecoderConfig], DecoderConfig]
    defaults: Mapping[str, Any]
    ropes: Callable[[Settings, int], tuple[Rope, ...]]  # from settings and head_dim
    activation: str = "hidden_act"  # the setting that names it
    norm_offset: float = 0.0  # added to stored norm weights when they are loaded


def family_of(config: Mapping[str, Any]) -> Family:
    """The row for a config.json. Raises `UnsupportedModelError` naming the architecture."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    if not isinstance(name, str) or name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UnsupportedModelError(f"architecture {name!r} is not served: use a model with one of {known}")
    return FAMILIES[name]


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Describe the decoder that a config.json asks for.

    Raises `UnsupportedModelError` naming the architecture or the setting that isn't served.
    """
    family = family_of(config)
    settings = Settings(config, family.defaults)
    _refuse_unserved(settings)
    described = family.refine(settings, _common(settings, family))
    if described.num_heads % described.num_kv_heads:
        raise UnsupportedModelError(
            f"{described.num_heads} query heads can't share {described.num_kv_heads} key heads evenly: "
            "num_attention_heads must be a multiple of num_key_value_heads"
        )
    if described.head_dim % 2:
        raise UnsupportedModelError(f"head_dim is {described.head_dim}: rotary positions need an even one")
    return described


def _refuse_unserved(settings: Settings) -> None:
    for key in ("quantization_config", "num_experts", "num_local_experts", "use_bidirectional_attention"):
        if settings.get(key):
            raise UnsupportedModelError(
                f"the setting {key} ({settings.get(key)!r}) is not served: use a model without it"
            )
    if settings.get("partial_rotary_factor") not in (None, 1.0):
        raise UnsupportedModelError(
            f"partial_rotary_factor {settings.get('partial_rotary_factor')!r} is not served: use a model without it"
        )


def _common(settings: Settings, family: Family) -> DecoderConfig:
    hidden_size, num_heads = settings.size("hidden_size"), settings.size("num_attention_heads")
    head_dim = settings.size("head_dim", hidden_size // num_heads, limit=MAX_HEAD_DIM)
    num_layers = settings.size("num_hidden_layers", limit=MAX_LAYERS)
    ropes = family.ropes(settings, head_dim)
    return DecoderConfig(
        architecture=settings.get("architectures")[0],
        vocab_size=settings.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=settings.size("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=settings.size("num_key_value_heads", num_heads),
        head_dim=head_dim,
        layers=(LayerConfig(window=None, rope=0),) * num_layers,
        ropes=ropes,
        max_positions=min(rope.max_positions for rope in ropes),
        norm_eps=settings.number("rms_norm_eps", 1e-6),
        attention_scale=head_dim**-0.5,
        activation=settings.choice(family.activation, _ACTIVATIONS),
        tied_embeddings=settings.flag("tie_word_embeddings"),
    )


def _refine_llama(settings: Settings, base: DecoderConfig) -> DecoderConfig:
    bias = settings.flag("attention_bias")
    return replace(base, qkv_bias=bias, o_bias=bias, mlp_bias=settings.flag("mlp_bias"))


def _refine_mistral(settings: Settings, base: DecoderConfig) -> DecoderConfig:
    if settings.get("layer_types") is not None:
        raise UnsupportedModelError("the setting layer_types is not served for Mistral: use a model without it")
    window = settings.optional_size("sliding_window")
    return replace(base, layers=(LayerConfig(window, rope=0),) * base.num_layers)


def _refine_qwen2(settings: Settings, base: DecoderConfig) -> DecoderConfig:
    return replace(base, qkv_bias=True, layers=_qwen_layers(settings, base.num_layers))


def _refine_qwen3(settings: Settings, base: DecoderConfig) -> DecoderConfig:
    bias = settings.flag("attention_bias")
    layers = _qwen_layers(settings, base.num_layers)
    return replace(base, qk_norm=True, qkv_bias=bias, o_bias=bias, layers=layers)


def _qwen_layers(settings: Settings, num_layers: int) -> tuple[LayerConfig, ...]:
    window = settings.optional_size("sliding_window") if settings.flag("use_sliding_window") else None
    first_windowed = settings.get("max_window_layers")
    if window is not None and settings.get("layer_types") is None and not isinstance(first_windowed, int):
        raise wrong_setting("max_window_layers", first_windowed, "a whole number")
    pattern = [SLIDING if window is not None and i >= first_windowed else FULL for i in range(num_layers)]
    return tuple(LayerConfig(window if kind == SLIDING else None, rope=0) for kind in _layer_types(settings, pattern))


def _refine_gemma3(settings: Settings, base: DecoderConfig) -> DecoderConfig:
    period = settings.size("sliding_window_pattern", 6)
    pattern = [FULL if (i + 1) % period == 0 else SLIDING for i in range(base.num_layers)]
    window = settings.size("sliding_window")
    kinds = _layer_types(settings, pattern)
    bias = settings.flag("attention_bias")
    return replace(
        base,
        layers=tuple(LayerConfig(window if kind == SLIDING else None, int(kind == SLIDING)) for kind in kinds),
        attention_scale=settings.number("query_pre_attn_scalar", 256) ** -0.5,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        sandwich_norms=True,
        embedding_multiplier=base.hidden_size**0.5,
        attention_soft_cap=settings.optional_number("attn_logit_softcapping"),
        logit_soft_cap=settings.optional_number("final_logit_softcapping"),
    )


def _one_rope(settings: Settings, head_dim: int) -> tuple[Rope, ...]:
    return (rope_from_config(settings, head_dim),)


def _gemma3_ropes(settings: Settings, head_dim: int) -> tuple[Rope, ...]:
    """Rotations of full and of sliding layers, in this order. `rope_scaling` is for full layers only."""
    by_kind = settings.section("rope_parameters")
    if not by_kind.keys() <= {FULL, SLIDING}:
        raise wrong_setting("rope_parameters", by_kind, f"an object with the keys {FULL} and {SLIDING}")
    full, sliding = (Settings(by_kind).section(kind) for kind in (FULL, SLIDING))
    full |= settings.section("rope_scaling")
    full.setdefault("rope_theta", settings.number("rope_theta", 1_000_000.0))
    sliding.setdefault("rope_theta", settings.number("rope_local_base_freq", 10_000.0))
    max_positions = settings.size("max_position_embeddings")
    return rope_from_parameters(full, head_dim, max_positions), rope_from_parameters(sliding, head_dim, max_positions)


def _layer_types(settings: Settings, default: list[str]) -> list[str]:
    kinds = settings.get("layer_types")
    if kinds is None:
        return default
    if not isinstance(kinds, list) or len(kinds) != len(default) or not all(k in (FULL, SLIDING) for k in kinds):
        raise wrong_setting("layer_types", kinds, f"a list of {len(default)} items {FULL} or {SLIDING}")
    return kinds


_QWEN = {"hidden_act": "silu", "sliding_window": 4096, "max_window_layers": 28}
_GEMMA3 = {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(_refine_llama, {"hidden_act": "silu"}, _one_rope),
    "MistralForCausalLM": Family(_refine_mistral, {"hidden_act": "silu", "sliding_window": 4096}, _one_rope),
    "Qwen2ForCausalLM": Family(_refine_qwen2, _QWEN, _one_rope),
    "Qwen3ForCausalLM": Family(_refine_qwen3, {**_QWEN, "head_dim": 128}, _one_rope),
    "Gemma3ForCausalLM": Family(_refine_gemma3, _GEMMA3, _gemma3_ropes, "hidden_activation", norm_offset=1.0),
}

"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864) and the ways in which their frequencies are scaled.

Every scaling is reduced, when the model is loaded, to one list of frequencies and one factor on cosine and sine. Two
scalings depend on the length of the sequence: *dynamic* changes all frequencies with each token beyond the trained
length, *longrope* switches to other ones there. Keys in the cache were rotated with the old frequencies, so such a
model is served up to its trained length, where both are exact, and longer sequences are refused.

Arithmetic is float32 and in the order of transformers' implementation: at position 8,000 one unit in the last place of
a frequency already moves an angle by 5e-4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from mlserve.errors import UnsupportedModelError
from mlserve.model.settings import Settings, wrong_setting

__all__ = ["Rope", "RopeScaling", "rope_from_config", "rope_from_parameters", "rotation"]

DEFAULT_THETA = 10_000.0


class RopeScaling(StrEnum):
    """How a model stretches its trained positions over longer sequences."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"
    DYNAMIC = "dynamic"


@dataclass(frozen=True, slots=True)
class Rope:
    """One rotation: dimension pair i turns by `position * frequencies[i]`."""

    scaling: RopeScaling
    frequencies: tuple[float, ...]  # [R / 2], exact float32 values
    attention_factor: float  # on cosine and sine
    max_positions: int  # positions from here on would be rotated wrongly
    # M-RoPE: how many of the frequencies, in order, turn by frame, by row and by column. None: all by the one position.
    sections: tuple[int, int, int] | None = None


def rotation(positions: Tensor, frequencies: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    """Cosine and sine for `positions: [T]`, or `[3, T]` with M-RoPE, and the rope's `frequencies: [R / 2]` as a tensor:
    `[T, R / 2]` float32 each."""
    if positions.dim() == 1 or rope.sections is None:
        angles = (positions if positions.dim() == 1 else positions[0]).float()[:, None] * frequencies
    else:
        parts = zip(positions.float(), frequencies.split_with_sizes(rope.sections), strict=True)
        angles = torch.cat([component[:, None] * part for component, part in parts], dim=1)
    cos, sin = angles.cos(), angles.sin()
    if rope.attention_factor != 1.0:
        cos *= rope.attention_factor
        sin *= rope.attention_factor
    return cos, sin


def rope_from_config(config: Settings, head_dim: int) -> Rope:
    """The rotation of a model that has one for all layers.

    Understands `rope_theta` with `rope_scaling` beside it, and the `rope_parameters` that replaced both.
    """
    params = config.section("rope_scaling") or config.section("rope_parameters")
    params.setdefault("rope_theta", config.number("rope_theta", DEFAULT_THETA))
    trained = config.optional_size("original_max_position_embeddings")
    if trained is not None and "original_max_position_embeddings" in _KNOWN_KEYS[_scaling(params)]:
        params["original_max_position_embeddings"] = trained  # the outer one wins over the section's own
    return rope_from_parameters(params, head_dim, config.size("max_position_embeddings"))


def rope_from_parameters(params: Mapping[str, Any], head_dim: int, max_positions: int) -> Rope:
    """The rotation that one `rope_parameters` object describes.

    Raises `UnsupportedModelError` naming an unknown scaling, an unknown parameter, or a value out of range.
    """
    params = dict(params)
    sections = params.pop("mrope_section", None)
    scaling = _scaling(params)
    unknown = params.keys() - _KNOWN_KEYS[scaling] - {"rope_type", "type", "rope_theta"}
    if unknown:
        raise UnsupportedModelError(f"rope scaling {scaling.value!r} has the unknown parameter {min(unknown)!r}")
    settings = Settings(params)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    theta = settings.number("rope_theta")
    if theta <= 1:
        raise wrong_setting("rope_theta", theta, "a number above 1")
    base = theta**exponents  # [R / 2]: radians per position are 1 / base
    frequencies, attention_factor, limit = _SCALINGS[scaling](settings, base, max_positions)
    return Rope(scaling, tuple(frequencies.tolist()), attention_factor, limit, _sections(sections, len(base)))


def _sections(value: Any, num_frequencies: int) -> tuple[int, int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 3 or not all(type(part) is int and part >= 0 for part in value):
        raise wrong_setting("mrope_section", value, "a list of three whole numbers")
    if sum(value) != num_frequencies:
        raise wrong_setting("mrope_section", value, f"three numbers that sum to {num_frequencies}")
    return (value[0], value[1], value[2])


def _scaling(params: Mapping[str, Any]) -> RopeScaling:
    name = params.get("rope_type", params.get("type", "default"))
    if name == "mrope":  # how early configs say that there is an mrope_section
        name = "default"
    try:
        return RopeScaling(name)
    except ValueError:
        known = ", ".join(RopeScaling)
        raise UnsupportedModelError(f"rope scaling {name!r} is not served: use a model with one of {known}") from None


Scaled = tuple[Tensor, float, int]  # frequencies [R / 2], attention factor, positions that may be served


def _default(settings: Settings, base: Tensor, max_positions: int) -> Scaled:
    return 1.0 / base, 1.0, max_positions


def _linear(settings: Settings, base: Tensor, max_positions: int) -> Scaled:
    """Position interpolation (Chen et al. 2023, arXiv:2306.15595)."""
    return 1.0 / base / settings.number("factor"), 1.0, max_positions


def _dynamic(settings: Settings, base: Tensor, max_positions: int) -> Scaled:
    """NTK-aware scaling, which equals the default up to the trained length: longer sequences are refused."""
    settings.number("factor")
    return 1.0 / base, 1.0, max_positions


def _llama3(settings: Settings, base: Tensor, max_positions: int) -> Scaled:
    """Llama 3.1: long wavelengths are interpolated, short ones kept, those between are blended."""
    factor, low, high = (settings.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    trained = settings.size("original_max_position_embeddings", max_positions)
    frequencies = 1.0 / base
    wavelengths = 2 * math.pi / frequencies
    is_long, is_short = wavelengths > trained / low, wavelengths < trained / high
    blend = (trained / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    scaled = torch.where(is_long, frequencies / factor, torch.where(is_short, frequencies, blended))
    return scaled, 1.0, max_positions


def _yarn(settings: Settings, base: Tensor, max_positions: int) -> Scaled:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): interpolation by parts, and a temperature on attention."""
    trained = settings.size("original_max_position_embeddings", max_positions)
    factor = settings.number("factor", max_positions / trained)
    dim = 2 * len(base)
    log_theta = math.log(settings.number("rope_theta"))

    def dimension_of(rotations: float) -> float:
        """The dimension that turns so many times over the trained length."""
        return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * log_theta)

    low, high = dimension_of(settings.number("beta_fast", 32)), dimension_of(settings.number("beta_slow", 1))
    if settings.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    keep = 1 - ramp
    frequencies = 1.0 / (factor * base) * (1 - keep) + 1.0 / base * keep
    return frequencies, _yarn_attention_factor(settings, factor), max(max_positions, int(trained * factor))


def _yarn_attention_factor(settings: Settings, factor: float) -> float:
    def temperature(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    given = settings.optional_number("attention_factor")
    if given is not None:
        return given
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        return temperature(settings.number("mscale")) / temperature(settings.number("mscale_all_dim"))
    return temperature(1.0)


def _longrope(settings: Settings, base: Tensor, max_positions: int) -> Scaled:
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753), with the factors for sequences up to the trained length."""
    trained = settings.size("original_max_position_embeddings", max_positions)
    short = torch.tensor(settings.numbers("short_factor", len(base)), dtype=torch.float32)
    settings.numbers("long_factor", len(base))
    factor = settings.number("factor", max_positions / trained)
    by_length = math.sqrt(1 + math.log(factor) / math.log(trained)) if min(factor, trained) > 1 else 1.0
    return 1.0 / (short * base), settings.number("attention_factor", by_length), min(trained, max_positions)


_SCALINGS: dict[RopeScaling, Callable[[Settings, Tensor, int], Scaled]] = {
    RopeScaling.DEFAULT: _default,
    RopeScaling.LINEAR: _linear,
    RopeScaling.LLAMA3: _llama3,
    RopeScaling.YARN: _yarn,
    RopeScaling.LONGROPE: _longrope,
    RopeScaling.DYNAMIC: _dynamic,
}
_TRAINED = "original_max_position_embeddings"
_YARN_KEYS = {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
_KNOWN_KEYS: dict[RopeScaling, set[str]] = {
    RopeScaling.DEFAULT: set(),
    RopeScaling.LINEAR: {"factor"},
    RopeScaling.LLAMA3: {"factor", "low_freq_factor", "high_freq_factor", _TRAINED},
    RopeScaling.YARN: {"factor", _TRAINED} | _YARN_KEYS,
    RopeScaling.LONGROPE: {"factor", "short_factor", "long_factor", "attention_factor", _TRAINED},
    RopeScaling.DYNAMIC: {"factor", _TRAINED},
}

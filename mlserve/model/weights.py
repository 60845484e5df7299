"""From named tensors to a decoder's weights: every tensor is checked against the config before the first is read.

Tensors go by their Hugging Face names, whatever file they come from.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mlserve.errors import CorruptWeightsError
from mlserve.kernels import Linear, Ops
from mlserve.model.config import DecoderConfig
from mlserve.model.decoder import DecoderWeights, LayerWeights

__all__ = ["TensorSource", "WeightBuilder", "check_tensors"]

Shape = tuple[int, ...]

_EMBEDDING, _LM_HEAD, _NORM = "model.embed_tokens", "lm_head", "model.norm"
_IGNORED = re.compile(
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
)  # old checkpoints; computed from the config


class TensorSource(Protocol):
    """Tensors of one model, by name."""

    shapes: Mapping[str, Shape]

    def read(self, name: str) -> Tensor:
        """A tensor of its own memory, floating point, on the CPU."""
        ...


def check_tensors(config: DecoderConfig, source: TensorSource) -> None:
    """Raise `CorruptWeightsError` naming the first tensor that is missing, misshapen, or unknown to the config."""
    expected = dict(_expected_shapes(config))
    for name, shape in expected.items():
        found = source.shapes.get(name)
        if found is None:
            raise CorruptWeightsError(f"tensor {name} {list(shape)} is missing: download the model again")
        if found != shape:
            raise CorruptWeightsError(
                f"tensor {name} has shape {list(found)}, but the config asks for {list(shape)}: "
                "weights and config are of different models"
            )
    ignored = {f"{_LM_HEAD}.weight"} if config.tied_embeddings else set()
    for name in source.shapes:
        if name not in expected and name not in ignored and not _IGNORED.fullmatch(name):
            raise CorruptWeightsError(
                f"tensor {name} is unknown to the config of a {config.architecture}: "
                "weights and config are of different models"
            )


def _expected_shapes(config: DecoderConfig) -> Iterator[tuple[str, Shape]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.q_size, config.kv_size
    projections = (
        ("self_attn.q_proj", (q, hidden), config.qkv_bias),
        ("self_attn.k_proj", (kv, hidden), config.qkv_bias),
        ("self_attn.v_proj", (kv, hidden), config.qkv_bias),
        ("self_attn.o_proj", (hidden, q), config.o_bias),
        ("mlp.gate_proj", (inner, hidden), config.mlp_bias),
        ("mlp.up_proj", (inner, hidden), config.mlp_bias),
        ("mlp.down_proj", (hidden, inner), config.mlp_bias),
    )
    yield f"{_EMBEDDING}.weight", (config.vocab_size, hidden)
    yield f"{_NORM}.weight", (hidden,)
    if not config.tied_embeddings:
        yield f"{_LM_HEAD}.weight", (config.vocab_size, hidden)
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}."
        for name, shape, has_bias in projections:
            yield f"{prefix}{name}.weight", shape
            if has_bias:
                yield f"{prefix}{name}.bias", shape[:1]
        for field, name in _norm_names(config).items():
            yield f"{prefix}{name}.weight", (config.head_dim if field in ("q_norm", "k_norm") else hidden,)


def _norm_names(config: DecoderConfig) -> dict[str, str]:
    """Stored names of a layer's norms by their field of `LayerWeights`.

    `post_attention_layernorm` stands in another place where norms are sandwiched.
    """
    names = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    if config.sandwich_norms:
        names["mlp_norm"] = "pre_feedforward_layernorm"
        names["post_attention_norm"] = "post_attention_layernorm"
        names["post_mlp_norm"] = "post_feedforward_layernorm"
    if config.qk_norm:
        names |= {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
    return names


@dataclass(frozen=True, slots=True)
class WeightBuilder:
    """Reads checked tensors and lays them out for one implementation of the operations."""

    config: DecoderConfig
    source: TensorSource
    ops: Ops
    dtype: torch.dtype
    device: torch.device
    norm_offset: float

    def build(self) -> DecoderWeights:
        """Read everything, one layer after the other."""
        embedding = self._linear(_EMBEDDING, has_bias=False)
        layers = tuple(self._layer(f"model.layers.{i}.") for i in range(self.config.num_layers))
        lm_head = embedding if self.config.tied_embeddings else self._linear(_LM_HEAD, has_bias=False)
        return DecoderWeights(embedding, layers, self._norm(_NORM), lm_head)

    def _layer(self, prefix: str) -> LayerWeights:
        config, attention, mlp = self.config, f"{prefix}self_attn.", f"{prefix}mlp."
        return LayerWeights(
            qkv_proj=self._linear(*(f"{attention}{name}_proj" for name in "qkv"), has_bias=config.qkv_bias),
            o_proj=self._linear(f"{attention}o_proj", has_bias=config.o_bias),
            gate_up_proj=self._linear(f"{mlp}gate_proj", f"{mlp}up_proj", has_bias=config.mlp_bias),
            down_proj=self._linear(f"{mlp}down_proj", has_bias=config.mlp_bias),
            **{field: self._norm(prefix + name) for field, name in _norm_names(config).items()},
        )

    def _linear(self, *names: str, has_bias: bool) -> Linear:
        """The matrices of that name as one, the first on top."""
        weight = self._joined([f"{name}.weight" for name in names])
        return self.ops.pack_linear(weight, self._joined([f"{name}.bias" for name in names]) if has_bias else None)

    def _joined(self, names: list[str]) -> Tensor:
        parts = [self._read(name, self.dtype) for name in names]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(self.device)

    def _norm(self, name: str) -> Tensor:
        return (self._read(f"{name}.weight", torch.float32) + self.norm_offset).to(self.device)

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor = self.source.read(name).to(dtype)
        if not tensor.sum(dtype=torch.float32).isfinite():
            raise CorruptWeightsError(
                f"tensor {name} has values that are not finite numbers in {dtype}: download the model again, or load "
                "it in another dtype"
            )
        return tensor

"""What a decoder is made of: one description that covers every family of models that is served."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mlserve.kernels import Activation
from mlserve.model.rope import Rope

__all__ = ["DecoderConfig", "LayerConfig"]


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """In what layers of one decoder differ: how far attention sees, and how positions are rotated."""

    window: int | None  # a query sees this many positions, its own included; None: all before it
    rope: int  # index into `DecoderConfig.ropes`


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder-only transformer with RMS norms, rotary positions, grouped-query attention and a gated MLP."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    ropes: tuple[Rope, ...]
    max_positions: int
    norm_eps: float
    attention_scale: float  # on the product of query and key
    activation: Activation = Activation.SILU
    tied_embeddings: bool = False  # the output layer is the embedding table
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # each query and key head is normed before it is rotated
    sandwich_norms: bool = False  # outputs of attention and MLP are normed before they join the residual
    embedding_multiplier: float = 1.0
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def q_size(self) -> int:
        """Columns of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of all key heads; value heads are as many."""
        return self.num_kv_heads * self.head_dim

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Memory that one token's keys and values take in the KV pool, over all layers."""
        return self.num_layers * 2 * self.kv_size * dtype.itemsize

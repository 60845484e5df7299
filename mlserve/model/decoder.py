"""The decoder: one forward pass over all tokens of a step, for every family of models."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mlserve.adapters.linear import StepAdapters
from mlserve.adapters.slots import Projection
from mlserve.kernels import Activation, Linear, Ops
from mlserve.model.config import DecoderConfig
from mlserve.model.inputs import ForwardBatch
from mlserve.model.rope import rotation

__all__ = ["Decoder", "DecoderWeights", "LayerWeights"]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Projections that read the same input are one matrix, the parts one below the other."""

    attention_norm: Tensor  # [H] float32, as all norms
    qkv_proj: Linear  # [(Hq + 2 * Hk) * D, H]
    o_proj: Linear  # [H, Hq * D]
    mlp_norm: Tensor  # [H]
    gate_up_proj: Linear  # [2 * I, H]
    down_proj: Linear  # [H, I]
    q_norm: Tensor | None = None  # [D]
    k_norm: Tensor | None = None  # [D]
    post_attention_norm: Tensor | None = None  # [H]
    post_mlp_norm: Tensor | None = None  # [H]


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a decoder, on its device."""

    embedding: Linear  # [V, H]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [H]
    lm_head: Linear  # [V, H]; the embedding itself if the two are tied


class Decoder:
    """Runs a model that `config` describes. Holds weights and nothing of any request."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, ops: Ops) -> None:
        self.config = config
        self.weights = weights
        self.ops = ops
        self.device = weights.norm.device
        self._frequencies = [torch.tensor(rope.frequencies, device=self.device) for rope in config.ropes]

    def forward(self, batch: ForwardBatch, kv: Tensor) -> Tensor:
        """Compute all tokens of a step and write their KV: `[R, H]`, the hidden states of `batch.logit_rows`.

        `kv: [blocks, layers, 2, block_size, Hk, D]`. The final norm is left to `logits`. Once the last layer's keys and
        values are written, nothing depends on rows without logits: they stop there.
        """
        ops, config, paged, rows, adapters = self.ops, self.config, batch.paged, batch.logit_rows, batch.adapters
        eps, heads = config.norm_eps, (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        rotations = self._rotations(batch.positions)
        residual = ops.embedding(batch.token_ids, self.weights.embedding)  # [T, H]
        if adapters is not None:
            adapters.embed(batch.token_ids, residual)
        if config.embedding_multiplier != 1.0:
            residual *= config.embedding_multiplier
        if batch.images is not None:
            residual[batch.images.rows] = batch.images.embeddings.to(residual.dtype)
        x = ops.rms_norm(residual, self.weights.layers[0].attention_norm, eps)
        last = config.num_layers - 1

        for i, (layer, kind, layer_kv) in enumerate(zip(self.weights.layers, config.layers, kv.unbind(1), strict=True)):
            if i > 0:
                x = ops.add_rms_norm(x, residual, layer.attention_norm, eps)
            qkv = self._linear(x, layer.qkv_proj, adapters, Projection.QKV, i)  # [T, (Hq + 2 * Hk) * D]
            q, k, v = qkv.view(len(qkv), -1, config.head_dim).split_with_sizes(heads, 1)  # views: [T, heads, D]
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = ops.rms_norm(q, layer.q_norm, eps), ops.rms_norm(k, layer.k_norm, eps)
            ops.rope_kv_write(q, k, v, *rotations[kind.rope], layer_kv, paged.slot_mapping)
            if i == last and len(rows) == 0:
                return residual[:0]
            x = ops.paged_attention(
                q, layer_kv, paged, scale=config.attention_scale, window=kind.window, soft_cap=config.attention_soft_cap
            )  # [T, Hq * D]
            if i == last:
                x, residual, adapters = x[rows], residual[rows], batch.logit_adapters
            x = self._linear(x, layer.o_proj, adapters, Projection.OUT, i)
            if layer.post_attention_norm is not None:
                x = ops.rms_norm(x, layer.post_attention_norm, eps)
            x = ops.add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = self._linear(x, layer.gate_up_proj, adapters, Projection.GATE_UP, i, config.activation)  # [T, I]
            x = self._linear(x, layer.down_proj, adapters, Projection.DOWN, i)
            if layer.post_mlp_norm is not None:
                x = ops.rms_norm(x, layer.post_mlp_norm, eps)
        return residual.add_(x)

    def logits(self, hidden: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        """Scores of the next token: `hidden: [R, H]` from `forward` `-> [R, V]` float32. `adapters` are of its rows."""
        x = self.ops.rms_norm(hidden, self.weights.norm, self.config.norm_eps)
        logits = self._linear(x, self.weights.lm_head, adapters, Projection.LM_HEAD, 0).float()
        cap = self.config.logit_soft_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _linear(
        self,
        x: Tensor,
        weight: Linear,
        adapters: StepAdapters | None,
        projection: Projection,
        layer: int,
        activation: Activation | None = None,
    ) -> Tensor:
        if adapters is None:
            return self.ops.linear(x, weight, activation=activation)
        return adapters.linear(projection, layer, x, weight, activation)

    def _rotations(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Cosine and sine of the step's tokens, `[T, D / 2]` each, once for all layers of a kind."""
        return [
            rotation(positions, frequencies, rope)
            for frequencies, rope in zip(self._frequencies, self.config.ropes, strict=True)
        ]

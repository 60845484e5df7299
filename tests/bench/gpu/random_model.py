"""A model of some shape with random weights, made on its device, and adapters for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gpu.cases import Rig
from roofline import Shape

from mlserve.adapters.host import HostAdapter, HostWeights
from mlserve.adapters.slots import AdapterSlots, slots_bytes
from mlserve.kernels import Linear, Ops
from mlserve.model.base_weights import base_shape
from mlserve.model.config import DecoderConfig, LayerConfig
from mlserve.model.decoder import Decoder, DecoderWeights, LayerWeights
from mlserve.model.graphs import GraphOptions, GraphRecorder
from mlserve.model.rope import rope_from_parameters
from mlserve.model.runner import ModelRunner

__all__ = ["Twins", "decoder_config", "random_twins"]

LOGIT_SPREAD = 3.0  # as a trained model's: another step's answer is then another token
NUM_CONTENTS = 2  # different adapters; slots hold them in turn, and each has memory of its own all the same
MEMORY_SHARE = 0.9  # of what is free, for slots and KV


def decoder_config(shape: Shape, max_positions: int) -> DecoderConfig:
    """Llama 3's."""
    return DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        layers=(LayerConfig(window=None, rope=0),) * shape.layers,
        ropes=(rope_from_parameters({"rope_theta": 500000.0}, shape.head_dim, max_positions),),
        max_positions=max_positions,
        norm_eps=1e-5,
        attention_scale=shape.head_dim**-0.5,
    )


def _random_decoder(rig: Rig, config: DecoderConfig, ops: Ops) -> Decoder:
    shape = rig.scale.shape

    def linear(out: int, size: int, spread: float = 1.0) -> Linear:
        return ops.pack_linear(rig.randn(out, size, std=spread * size**-0.5))

    def layer() -> LayerWeights:
        weights = {f"{name}_proj": linear(sum(out), size) for name, (size, out) in shape.linears.items()}
        norms = {name: torch.ones(shape.hidden, device=rig.device) for name in ("attention_norm", "mlp_norm")}
        return LayerWeights(**weights, **norms)

    layers = tuple(layer() for _ in range(shape.layers))
    embedding = ops.pack_linear(rig.randn(shape.vocabulary, shape.hidden))
    lm_head = linear(shape.vocabulary, shape.hidden, LOGIT_SPREAD)
    weights = DecoderWeights(embedding, layers, torch.ones(shape.hidden, device=rig.device), lm_head)
    return Decoder(config, weights, ops)


def _random_adapter(rig: Rig, config: DecoderConfig, number: int) -> HostAdapter:
    """On all seven projections of all layers. Its matrices are on the device, so that slots are filled at once."""
    base, weights = base_shape(config), {}
    for site in base.layer_sites():
        out, size = base.layer_modules[site.module]
        a, b = rig.randn(rig.scale.rank, size, std=size**-0.5), rig.randn(rig.scale.rank, out, std=rig.scale.rank**-0.5)
        weights[site] = HostWeights(a, b, scaling=1.0)
    return HostAdapter(number.to_bytes(32, "big"), None, weights)


@dataclass(frozen=True, slots=True)
class Twins:
    """Two runners over one decoder, one KV pool and the same slots: with graphs, and without."""

    graphed: ModelRunner
    eager: ModelRunner

    @property
    def num_blocks(self) -> int:
        """Block 0, which nobody uses, included."""
        return len(self.eager.kv)


def random_twins(rig: Rig, ops: Ops, recorder: GraphRecorder, free_bytes: int) -> Twins:
    """A pool for the largest batch at `Scale.step_context`, or what fits in `free_bytes` of the device beside the
    weights; full of random numbers, as are all slots."""
    scale = rig.scale
    max_positions = 2 * max(scale.prompt, scale.step_context)
    config = decoder_config(scale.shape, max_positions)
    decoder = _random_decoder(rig, config, ops)
    base = base_shape(config)
    slots = AdapterSlots(base, scale.num_slots, scale.rank, rig.dtype, rig.device)
    left = (
        MEMORY_SHARE * free_bytes - scale.shape.weight_bytes - slots_bytes(base, scale.num_slots, scale.rank, rig.dtype)
    )
    per_block = config.kv_bytes_per_token(rig.dtype) * scale.block_size
    wanted = max(scale.batches) * (scale.step_context // scale.block_size + 1) + scale.prompt // scale.block_size
    num_blocks = min(wanted, int(left // per_block)) + 1
    options = GraphOptions(recorder, max(scale.batches), max_positions)
    graphed = ModelRunner(decoder, num_blocks, scale.block_size, rig.dtype, slots, graphs=options)
    eager = ModelRunner(decoder, 1, scale.block_size, rig.dtype, slots)
    eager.kv = graphed.kv
    graphed.kv.normal_()
    contents = [_random_adapter(rig, config, number) for number in range(NUM_CONTENTS)]
    for slot in range(scale.num_slots):
        slots.write(slot, contents[slot % NUM_CONTENTS])
    slots.before_use(frozenset(range(scale.num_slots)))  # the adapters' own memory is given away when this returns
    return Twins(graphed, eager)

"""The base model as adapters see it: the shapes of its modules, and single weights from its files."""

from __future__ import annotations

import torch
from torch import Tensor

from mlserve.adapters.spec import BaseShape, Module, Site
from mlserve.model.config import DecoderConfig
from mlserve.model.weights import TensorSource

__all__ = ["FileBaseWeights", "base_shape"]


def base_shape(config: DecoderConfig) -> BaseShape:
    """What an adapter must fit."""
    hidden, inner = config.hidden_size, config.intermediate_size
    modules = {
        Module.Q_PROJ: (config.q_size, hidden),
        Module.K_PROJ: (config.kv_size, hidden),
        Module.V_PROJ: (config.kv_size, hidden),
        Module.O_PROJ: (hidden, config.q_size),
        Module.GATE_PROJ: (inner, hidden),
        Module.UP_PROJ: (inner, hidden),
        Module.DOWN_PROJ: (hidden, inner),
    }
    return BaseShape(config.num_layers, hidden, config.vocab_size, modules, config.tied_embeddings)


class FileBaseWeights:
    """Weights as the model holds them, read again from its files each time: few adapters need any.

    The decoder has its own laid out for its kernels. Threads may share it, since `TensorSource`s only read.
    """

    def __init__(self, source: TensorSource, config: DecoderConfig, dtype: torch.dtype) -> None:
        """`source` has passed `check_tensors`; `dtype` is the one that the model's weights are held in."""
        self._source = source
        self._tied = config.tied_embeddings
        self._dtype = dtype

    def equals(self, module: Module, weight: Tensor) -> bool:
        """Whether embed_tokens or lm_head is `weight: [vocabulary, H]`, once that has the dtype it is held in."""
        return torch.equal(self._read(Site(module)), weight.to(self._dtype))

    def weight(self, site: Site) -> Tensor:
        """`[out, in]` of one module, for embed_tokens the transpose of its table, on the CPU, in the held dtype."""
        stored = self._read(site)
        return stored.T if site.module is Module.EMBED_TOKENS else stored

    def bias(self, site: Site) -> Tensor | None:
        """`[out]` float32 of one module, on the CPU, rounded to the held dtype; None if it has none."""
        name = f"model.{site.path}.bias"
        return self._source.read(name).to(self._dtype).float() if name in self._source.shapes else None

    def _read(self, site: Site) -> Tensor:
        if site.module is Module.LM_HEAD and self._tied:
            site = Site(Module.EMBED_TOKENS)
        name = site.path if site.module is Module.LM_HEAD else f"model.{site.path}"
        return self._source.read(f"{name}.weight").to(self._dtype)

"""What an adapter is once it is read: low-rank weights by their place in the base model, and the adapter's identity."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from torch import Tensor

from mlserve.errors import ConfigError

__all__ = [
    "LAYER_MODULES",
    "AdapterLimits",
    "AdapterSpec",
    "BaseShape",
    "LoraWeights",
    "Module",
    "Site",
    "targets_of",
    "targets_text",
]


class Module(StrEnum):
    """A linear map of the decoder that an adapter can change."""

    Q_PROJ = "q_proj"
    K_PROJ = "k_proj"
    V_PROJ = "v_proj"
    O_PROJ = "o_proj"
    GATE_PROJ = "gate_proj"
    UP_PROJ = "up_proj"
    DOWN_PROJ = "down_proj"
    EMBED_TOKENS = "embed_tokens"
    LM_HEAD = "lm_head"


_POSITIONS = {module: position for position, module in enumerate(Module)}
# Modules that each layer has, by the part of the layer that they are in.
LAYER_MODULES: Mapping[Module, str] = {
    Module.Q_PROJ: "self_attn",
    Module.K_PROJ: "self_attn",
    Module.V_PROJ: "self_attn",
    Module.O_PROJ: "self_attn",
    Module.GATE_PROJ: "mlp",
    Module.UP_PROJ: "mlp",
    Module.DOWN_PROJ: "mlp",
}


@dataclass(frozen=True, slots=True)
class Site:
    """One module of the base model. `layer` is None for those that stand outside the layers."""

    module: Module
    layer: int | None = None

    @property
    def path(self) -> str:
        """Its name inside the decoder: `layers.3.self_attn.q_proj`, `lm_head`."""
        if self.layer is None:
            return self.module.value
        return f"layers.{self.layer}.{LAYER_MODULES[self.module]}.{self.module}"

    @property
    def order(self) -> tuple[bool, int, int]:
        """Sorts sites: outside the layers first, then layer by layer, each in the order of `Module`."""
        return self.layer is not None, self.layer or 0, _POSITIONS[self.module]


@dataclass(frozen=True, slots=True)
class BaseShape:
    """What the base model's modules look like: all that the reading of adapters needs to know of it."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    layer_modules: Mapping[Module, tuple[int, int]]  # [out, in] of each module that every layer has
    tied_embeddings: bool = False  # the output layer is the embedding table

    def size(self, module: Module) -> tuple[int, int] | None:
        """`[out, in]` of a module, None if the model hasn't got it. An embedding maps one-hot tokens to vectors."""
        if module is Module.EMBED_TOKENS:
            return self.hidden_size, self.vocab_size
        if module is Module.LM_HEAD:
            return self.vocab_size, self.hidden_size
        return self.layer_modules.get(module)

    def layer_sites(self) -> Iterator[Site]:
        """The modules of all layers, in order."""
        for layer in range(self.num_layers):
            yield from (Site(module, layer) for module in self.layer_modules)

    def __contains__(self, site: Site) -> bool:
        return self.size(site.module) is not None and (site.layer is None or site.layer < self.num_layers)


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """How large an adapter may be. Raises `ConfigError` for limits that nothing fits."""

    max_rank: int = 64
    max_bytes: int = 2**30  # of the weights file

    def __post_init__(self) -> None:
        for name in ("max_rank", "max_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: give a number above 0")


@dataclass(frozen=True, slots=True, eq=False)
class LoraWeights:
    """What an adapter adds to one module's weight `W: [out, in]`: scaling * b @ a, in the dtype of the file.

    With a magnitude m (DoRA) row i of the sum W + scaling * b @ a is then rescaled to have the norm m[i]. An embedding
    table is the transpose of its W: token t gets the column t.
    """

    a: Tensor  # [r, in]
    b: Tensor  # [out, r]
    scaling: float
    magnitude: Tensor | None = None  # [out], DoRA only

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """a, b and, if there is one, the magnitude."""
        return (self.a, self.b) if self.magnitude is None else (self.a, self.b, self.magnitude)

    def delta(self) -> Tensor:
        """`[out, in]` float32: scaling * b @ a."""
        return self.scaling * (self.b.float() @ self.a.float())


@dataclass(frozen=True, slots=True, eq=False)
class AdapterSpec:
    """An adapter that fits its base model, in host memory. Two of one digest compute the same."""

    digest: bytes  # 32 bytes, see digest.py
    weights: Mapping[Site, LoraWeights]  # in the order of sites
    # An activated LoRA acts from the last place on where the prompt has these tokens; None: everywhere.
    invocation_tokens: tuple[int, ...] | None = None

    @property
    def rank(self) -> int:
        """The largest rank of any module."""
        return max(weights.rank for weights in self.weights.values())

    @property
    def num_bytes(self) -> int:
        """Host memory that the tensors take."""
        return sum(tensor.nbytes for weights in self.weights.values() for tensor in weights.tensors)

    @property
    def uses_dora(self) -> bool:
        return any(weights.magnitude is not None for weights in self.weights.values())

    @property
    def targets(self) -> Mapping[Module, tuple[int, ...]]:
        """The modules that are changed, and in which layers; an empty tuple for those outside the layers."""
        return targets_of(self.weights)


def targets_of(sites: Iterable[Site]) -> dict[Module, tuple[int, ...]]:
    """Modules of some sites, in their order, and the layers of each; an empty tuple for those outside the layers."""
    found: dict[Module, list[int]] = {}
    for site in sites:
        found.setdefault(site.module, []).extend([] if site.layer is None else [site.layer])
    return {module: tuple(found[module]) for module in Module if module in found}


def targets_text(targets: Mapping[Module, tuple[int, ...]]) -> str:
    """`q_proj, v_proj (layers 0-3, 7), lm_head`."""
    texts = []
    for layers, group in groupby(targets.items(), key=lambda item: item[1]):
        where = f" (layer{'s' if len(layers) > 1 else ''} {_ranges(layers)})" if layers else ""
        texts.append(", ".join(module for module, _ in group) + where)
    return ", ".join(texts)


def _ranges(layers: tuple[int, ...]) -> str:
    runs = []
    for _, group in groupby(enumerate(layers), key=lambda pair: pair[1] - pair[0]):
        run = [layer for _, layer in group]
        runs.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(runs)

"""An adapter as host memory keeps it: ready to be copied into a slot of the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from mlserve.adapters.dora import row_scales
from mlserve.adapters.peft_format import BaseWeights, read_adapter
from mlserve.adapters.spec import AdapterLimits, AdapterSpec, BaseShape, LoraWeights, Module, Site, targets_of
from mlserve.errors import CorruptAdapterError

__all__ = ["HostAdapter", "HostWeights", "host_adapter", "read_host_adapter"]


@dataclass(frozen=True, slots=True, eq=False)
class HostWeights:
    """What an adapter makes of one module: `row_scales * (W x + scaling * b.T (a x)) + bias`; a and b have r rows."""

    a: Tensor  # [r, in], dtype of the file
    b: Tensor  # [r, out], dtype of the file
    scaling: float  # not in b
    row_scales: Tensor | None = None  # [out] float32, DoRA only; None: all 1
    bias: Tensor | None = None  # [out] float32, the base model's; only with row_scales, which must not scale it

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def num_bytes(self) -> int:
        """Host memory that the tensors take."""
        tensors = (self.a, self.b, self.row_scales, self.bias)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@dataclass(frozen=True, slots=True, eq=False)
class HostAdapter:
    """An adapter of one base model in host memory. Two of one digest are the same."""

    digest: bytes  # of its content, see digest.py
    invocation_tokens: tuple[int, ...] | None  # as in `AdapterSpec`
    weights: Mapping[Site, HostWeights]  # in the order of sites

    @property
    def rank(self) -> int:
        """The largest rank of any module."""
        return max(weights.rank for weights in self.weights.values())

    @property
    def num_bytes(self) -> int:
        """Host memory that the tensors take."""
        return sum(weights.num_bytes for weights in self.weights.values())

    @property
    def targets(self) -> Mapping[Module, tuple[int, ...]]:
        """The modules that are changed, and in which layers; an empty tuple for those outside the layers."""
        return targets_of(self.weights)


def read_host_adapter(
    path: Path, base: BaseShape, limits: AdapterLimits, base_weights: BaseWeights, root: Path | None
) -> HostAdapter:
    """Read the adapter in a folder. Arguments and errors are those of `read_adapter`."""
    return host_adapter(read_adapter(path, base, limits, base_weights=base_weights, root=root), base_weights)


def host_adapter(spec: AdapterSpec, base_weights: BaseWeights) -> HostAdapter:
    """Lay out what was read. Base weights are read for modules with DoRA only, one at a time.

    Raises `CorruptAdapterError` for DoRA on a weight that has a row of zeros.
    """
    weights = {site: _host_weights(site, lora, base_weights) for site, lora in spec.weights.items()}
    return HostAdapter(spec.digest, spec.invocation_tokens, MappingProxyType(weights))


def _host_weights(site: Site, lora: LoraWeights, base_weights: BaseWeights) -> HostWeights:
    b = lora.b.T.contiguous()
    if lora.magnitude is None:
        return HostWeights(lora.a, b, lora.scaling)
    try:
        scales = row_scales(lora, base_weights.weight(site))
    except CorruptAdapterError as error:
        raise CorruptAdapterError(f"{site.path} can't be adapted: {error}") from None
    return HostWeights(lora.a, b, lora.scaling, scales, base_weights.bias(site))

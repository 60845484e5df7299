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
    """What an adapter does to one module: `row_scales * (W x + scaling * b.T (a x))`, both matrices with r rows."""

    a: Tensor  # [r, in], dtype of the file
    b: Tensor  # [r, out], dtype of the file
    scaling: float  # not in b
    row_scales: Tensor | None = None  # [out] float32, DoRA only; None: all 1

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def num_bytes(self) -> int:
        """Host memory that the tensors take."""
        return self.a.nbytes + self.b.nbytes + (0 if self.row_scales is None else self.row_scales.nbytes)


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
    scales = None
    if lora.magnitude is not None:
        try:
            scales = row_scales(lora, base_weights.weight(site))
        except CorruptAdapterError as error:
            raise CorruptAdapterError(f"{site.path} can't be adapted: {error}") from None
    return HostWeights(lora.a, lora.b.T.contiguous(), lora.scaling, scales)

"""Reads adapters from the folders that PEFT's `save_pretrained` and trainers built on it write.

The tensors in the file decide which modules are changed; adapter_config.json says how, and is checked against them. An
adapter is read as a whole or refused with every reason that was found: nothing in its file is ever left unapplied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from mlserve.adapters.checks import AdapterTensors, check_settings, check_tensors, scalings, sort_keys
from mlserve.adapters.digest import adapter_digest
from mlserve.adapters.folder import AdapterFolder
from mlserve.adapters.keys import Part
from mlserve.adapters.peft_config import LoraSettings, parse_config
from mlserve.adapters.spec import AdapterLimits, AdapterSpec, BaseShape, LoraWeights, Module, Site
from mlserve.adapters.tensor_file import TensorFile
from mlserve.errors import AdapterError, CorruptAdapterError, UnsupportedAdapterError

__all__ = ["BaseWeights", "Survey", "read_adapter", "survey"]


class BaseWeights(Protocol):
    """The base model's own weights: what DoRA rescales, and tables to tell an adapter's copy from a replacement."""

    def equals(self, module: Module, weight: Tensor) -> bool:
        """Whether embed_tokens or lm_head is `weight: [vocabulary, H]`, once that has the dtype it is held in."""
        ...

    def weight(self, site: Site) -> Tensor:
        """`[out, in]` of one module, for embed_tokens the transpose of its table, on the CPU, in the held dtype."""
        ...

    def bias(self, site: Site) -> Tensor | None:
        """`[out]` float32 of one module, on the CPU; None if it has none."""
        ...


@dataclass(frozen=True, slots=True)
class CheckedFiles:
    """An adapter that nothing speaks against so far; its tensors are yet to be read."""

    settings: LoraSettings
    tensors: AdapterTensors
    scalings: Mapping[Site, float]
    file: TensorFile

    def read(self, base_weights: BaseWeights | None = None) -> AdapterSpec:
        """Read the tensors. Raises `AdapterError` for what only their values reveal."""
        self._check_copies(base_weights)
        weights = {}
        for site, keys in self.tensors.keys.items():
            magnitude = self._tensor(keys[Part.MAGNITUDE]) if Part.MAGNITUDE in keys else None
            a, b = self._tensor(keys[Part.A]), self._tensor(keys[Part.B])
            weights[site] = LoraWeights(a, b, self.scalings[site], magnitude)
        if self.settings.ensure_weight_tying:
            _check_tying(weights)
        tokens = self.settings.invocation_tokens
        return AdapterSpec(adapter_digest(weights, tokens), MappingProxyType(weights), tokens)

    def _check_copies(self, base_weights: BaseWeights | None) -> None:
        for module, key in self.tensors.full_weights.items():
            if base_weights is None or not base_weights.equals(module, self.file.read(key)):
                found = "can't be compared with" if base_weights is None else "differs from"
                raise UnsupportedAdapterError(
                    f"it replaces the whole of {module}, which is not served ({key} {found} the base model's): "
                    "train only LoRA on it, or save with save_embedding_layers=False"
                )

    def _tensor(self, key: str) -> Tensor:
        tensor = self.file.read(key)
        if not torch.isfinite(tensor).all():
            raise CorruptAdapterError(f"{key} has values that are not finite: the training diverged, repeat it")
        return tensor


@dataclass(frozen=True, slots=True)
class Survey:
    """All that can be said of an adapter before its tensors are read."""

    settings: LoraSettings | None  # None: there is no config that makes sense
    tensors: AdapterTensors | None  # None: there is no weights file that can be opened
    problems: tuple[AdapterError, ...]
    checked: CheckedFiles | None  # None if there are problems


def read_adapter(
    path: str | Path,
    base: BaseShape,
    limits: AdapterLimits,
    *,
    base_weights: BaseWeights | None = None,
    root: str | Path | None = None,
) -> AdapterSpec:
    """Read the adapter in a folder, whole or not at all.

    Everything that the headers of files say is checked before memory is taken for tensors. With `root`, nothing outside
    that folder is read, wherever links point. PEFT saves a copy of the base model's table beside LoRA on embed_tokens
    or lm_head; it is accepted if `base_weights` finds it unchanged.

    Raises `AdapterFileNotFoundError`, `UnsupportedAdapterError`, `CorruptAdapterError` or `AdapterLimitError`: the kind
    of the first problem, with the text of all.
    """
    with survey(path, base, limits, root) as found:
        try:
            if found.checked is not None:
                return found.checked.read(base_weights)
            problems = found.problems
        except AdapterError as error:
            problems = (error,)
    raise type(problems[0])(f"the adapter in {str(path)!r} can't be loaded: {'; '.join(map(str, problems))}")


def _check_tying(weights: Mapping[Site, LoraWeights]) -> None:
    """PEFT makes one of both adapters of a tied table, by which of them it happens to read last."""
    embedding, head = weights.get(Site(Module.EMBED_TOKENS)), weights.get(Site(Module.LM_HEAD))
    if embedding is None or head is None:
        return
    if not (torch.equal(head.a, embedding.b.T) and torch.equal(head.b, embedding.a.T)):
        raise CorruptAdapterError("ensure_weight_tying is set, but embed_tokens and lm_head differ: save it again")


@contextmanager
def survey(
    path: str | Path, base: BaseShape | None, limits: AdapterLimits, root: str | Path | None = None
) -> Iterator[Survey]:
    """Look at an adapter, and keep its weights file open meanwhile. Without `base` only it alone is checked."""
    folder = AdapterFolder(Path(path), None if root is None else Path(root))
    problems: list[AdapterError] = []
    settings = tensors = file = None
    scales: Mapping[Site, float] = {}
    with ExitStack() as stack:
        try:
            settings, problems = parse_config(folder.read_config())
        except AdapterError as error:
            problems.append(error)
        try:
            file = stack.enter_context(folder.open_tensors(limits.max_bytes))
        except AdapterError as error:
            problems.append(error)
        if file is not None:
            tensors, wrong = sort_keys(file.infos)
            problems += [*wrong, *check_tensors(tensors, base, limits)]
        if tensors is not None and settings is not None:
            scales, wrong = scalings(tensors, settings)
            problems += [*wrong, *check_settings(tensors, settings, base)]
        checked = None
        if not problems and settings is not None and tensors is not None and file is not None:
            checked = CheckedFiles(settings, tensors, scales, file)
        yield Survey(settings, tensors, _without_repetitions(problems), checked)


def _without_repetitions(problems: list[AdapterError]) -> tuple[AdapterError, ...]:
    """A folder that isn't there, or one pattern, can be noticed twice."""
    first: dict[str, AdapterError] = {}
    for error in problems:
        first.setdefault(str(error), error)
    return tuple(first.values())

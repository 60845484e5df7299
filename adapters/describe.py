"""What an adapter is and whether it can be served: the data behind `mlserve adapters inspect`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from mlserve.adapters.keys import Part
from mlserve.adapters.peft_format import BaseWeights, Survey, survey
from mlserve.adapters.spec import AdapterLimits, AdapterSpec, BaseShape, targets_of, targets_text
from mlserve.errors import AdapterError

__all__ = ["AdapterDescription", "describe_adapter"]


@dataclass(frozen=True, slots=True)
class AdapterDescription:
    """What could be found out about an adapter. Fields are None where its files don't say or can't be read."""

    path: Path
    kind: str | None = None  # LoRA, DoRA or activated LoRA
    ranks: tuple[int, ...] | None = None  # that occur, ascending
    scalings: tuple[float, ...] | None = None  # that occur, ascending
    targets: str | None = None  # modules and their layers
    num_parameters: int | None = None
    num_bytes: int | None = None  # in host memory, in the dtype of the file
    invocation_tokens: tuple[int, ...] | None = None
    digest: bytes | None = None  # None if there are problems
    problems: tuple[str, ...] = ()  # why it can't be served: all that were found

    @property
    def text(self) -> str:
        """One line for each thing that is known."""
        parameters = self.num_parameters
        lines = {
            "adapter": str(self.path),
            "kind": self.kind,
            "rank": _span(self.ranks),
            "scaling": _span(self.scalings),
            "targets": self.targets,
            "invoked by": self.invocation_tokens and f"tokens {' '.join(map(str, self.invocation_tokens))}",
            "parameters": parameters and f"{parameters:,}",
            "host memory": self.num_bytes and _mebibytes(self.num_bytes),
            "on a device": parameters
            and f"{_mebibytes(2 * parameters)} in 16 bits, {_mebibytes(4 * parameters)} in float32",
            "digest": self.digest and self.digest.hex(),
            "served": "no" if self.problems else "yes",
        }
        known = [f"{label:<12} {value}" for label, value in lines.items() if value]
        return "\n".join([*known, *(f"  - {problem}" for problem in self.problems)])


def describe_adapter(
    path: str | Path,
    base: BaseShape | None = None,
    limits: AdapterLimits | None = None,
    *,
    base_weights: BaseWeights | None = None,
    root: str | Path | None = None,
) -> AdapterDescription:
    """Describe the adapter in a folder, whatever is wrong with it; never raises for what the folder holds.

    Arguments are those of `read_adapter`. Without `base`, whether the adapter fits a model is not looked at.
    """
    with survey(path, base, limits or AdapterLimits(), root) as found:
        problems = list(map(str, found.problems))
        spec: AdapterSpec | None = None
        try:
            spec = None if found.checked is None else found.checked.read(base_weights)
        except AdapterError as error:
            problems.append(str(error))
        return _description(Path(path), found, spec, tuple(problems))


def _description(path: Path, found: Survey, spec: AdapterSpec | None, problems: tuple[str, ...]) -> AdapterDescription:
    if found.tensors is None:
        return AdapterDescription(path, kind=_kind(found), problems=problems)
    tensors = found.tensors
    infos = [tensors.infos[key] for parts in tensors.keys.values() for key in parts.values()]
    return AdapterDescription(
        path,
        kind=_kind(found),
        ranks=tuple(sorted({tensors.rank(site) for site in tensors.keys})),
        scalings=None if spec is None else tuple(sorted({lora.scaling for lora in spec.weights.values()})),
        targets=targets_text(targets_of(tensors.keys)),
        num_parameters=sum(math.prod(info.shape) for info in infos),
        num_bytes=sum(info.num_bytes for info in infos),
        invocation_tokens=None if found.settings is None else found.settings.invocation_tokens,
        digest=None if spec is None else spec.digest,
        problems=problems,
    )


def _kind(found: Survey) -> str | None:
    if found.settings is None:
        return None
    if found.settings.invocation_tokens is not None:
        return "activated LoRA"
    has_magnitudes = found.tensors is not None and any(Part.MAGNITUDE in parts for parts in found.tensors.keys.values())
    return "DoRA" if found.settings.use_dora or has_magnitudes else "LoRA"


def _span(values: tuple[int, ...] | tuple[float, ...] | None) -> str | None:
    if not values:
        return None
    return f"{values[0]:g}" if len(values) == 1 else f"{values[0]:g} to {values[-1]:g}"


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.2f} MiB"

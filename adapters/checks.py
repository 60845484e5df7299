"""What is checked before an adapter's tensors are read: keys, shapes, and whether file, config and base model agree.

Each check returns problems as errors that are yet to be raised, so that all reasons can be told at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from mlserve.adapters.keys import Key, Part, parse_key, why_unknown
from mlserve.adapters.peft_config import LoraSettings
from mlserve.adapters.spec import AdapterLimits, BaseShape, Module, Site
from mlserve.adapters.targets import pattern_values, targeted
from mlserve.adapters.tensor_file import DTYPES, TensorInfo
from mlserve.errors import AdapterError, AdapterLimitError, CorruptAdapterError, UnsupportedAdapterError

__all__ = ["AdapterTensors", "check_settings", "check_tensors", "listed", "scalings", "sort_keys"]

_FLOATS = "float32, float16 or bfloat16"


@dataclass(frozen=True, slots=True)
class AdapterTensors:
    """The tensors of a file by what they are for."""

    infos: Mapping[str, TensorInfo]
    keys: Mapping[Site, Mapping[Part, str]]  # in the order of sites
    paths: Mapping[Site, str]  # module paths in the model that was trained
    full_weights: Mapping[Module, str]  # keys of whole tables: of embed_tokens and lm_head

    def info(self, site: Site, part: Part) -> TensorInfo | None:
        key = self.keys[site].get(part)
        return None if key is None else self.infos[key]

    def rank(self, site: Site) -> int:
        """Rows of A; sites without an A of two dimensions have none."""
        info = self.info(site, Part.A)
        return info.shape[0] if info is not None and len(info.shape) == 2 else 0


def sort_keys(infos: Mapping[str, TensorInfo]) -> tuple[AdapterTensors, list[AdapterError]]:
    """Find out what each tensor is for. Problems: keys that nobody knows, keys that mean the same, no LoRA at all."""
    problems: list[AdapterError] = []
    parsed = {name: parse_key(name) for name in infos}
    known = {name: key for name, key in parsed.items() if key is not None}
    problems += _unknown_keys([name for name, key in parsed.items() if key is None])
    names = sorted({key.adapter for key in known.values() if key.adapter is not None})
    if len(names) > 1:
        problems.append(UnsupportedAdapterError(f"the file holds several adapters, {listed(names)}: save each alone"))
    keys: dict[Site, dict[Part, str]] = {}
    for name, key in sorted(known.items(), key=_order):
        parts = keys.setdefault(key.site, {})
        if key.part in parts and len(names) < 2:
            problems.append(CorruptAdapterError(f"{parts[key.part]} and {name} are the same tensor: keep one"))
        parts[key.part] = name
    full_weights = {
        site.module: parts.pop(Part.FULL_WEIGHT) for site, parts in keys.items() if Part.FULL_WEIGHT in parts
    }
    keys = {site: parts for site, parts in keys.items() if parts}
    if not keys:
        problems.append(CorruptAdapterError("the file holds no LoRA tensors that could be applied: save it again"))
    return AdapterTensors(infos, keys, {key.site: key.module_path for key in known.values()}, full_weights), problems


def _order(item: tuple[str, Key]) -> tuple[tuple[bool, int, int], str]:
    return item[1].site.order, item[0]


def _unknown_keys(names: list[str]) -> Iterator[AdapterError]:
    by_reason: dict[str, list[str]] = {}
    for name in names:
        by_reason.setdefault(why_unknown(name), []).append(name)
    for reason, group in by_reason.items():
        yield UnsupportedAdapterError(f"{_count(group)} would not be applied, {listed(group)}: {reason}")


def check_tensors(tensors: AdapterTensors, base: BaseShape | None, limits: AdapterLimits) -> Iterator[AdapterError]:
    """Whether the tensors make pairs of matrices that fit the base model, by their shapes and dtypes."""
    used = [key for parts in tensors.keys.values() for key in parts.values()] + list(tensors.full_weights.values())
    if other := [key for key in used if tensors.infos[key].dtype not in DTYPES]:
        dtypes = ", ".join(sorted({tensors.infos[key].dtype for key in other}))
        yield UnsupportedAdapterError(f"{_count(other)} are stored as {dtypes}, {listed(other)}: use {_FLOATS}")
    if single := [site.path for site, parts in tensors.keys.items() if not {Part.A, Part.B} <= parts.keys()]:
        yield CorruptAdapterError(
            f"one of the matrices A and B is missing for {listed(single)}: save the adapter again"
        )
    if base is not None and (strange := [site.path for site in tensors.keys if site not in base]):
        yield UnsupportedAdapterError(
            f"{listed(strange)} can't be applied: the base model has {base.num_layers} layers with "
            f"{', '.join(base.layer_modules)} each; load the adapter on the model that it was trained on"
        )
    yield from (error for site in tensors.keys for error in _check_shapes(tensors, site, base))
    yield from _check_full_weights(tensors, base)
    rank, site = max(((tensors.rank(site), site.path) for site in tensors.keys), default=(0, ""))
    if rank > limits.max_rank:
        yield AdapterLimitError(f"it has rank {rank} (in {site}), limit {limits.max_rank}: raise max_lora_rank")


def _check_shapes(tensors: AdapterTensors, site: Site, base: BaseShape | None) -> Iterator[AdapterError]:
    """A is [r, in], B is [out, r] and a magnitude is [out]; without a base model, `in` and `out` can be anything."""
    a, b, magnitude = (tensors.info(site, part) for part in (Part.A, Part.B, Part.MAGNITUDE))
    if a is None or b is None:
        return
    size = base.size(site.module) if base is not None and site in base else None
    out, into = size or ((*b.shape, 0)[0], (*a.shape, 0, 0)[1])
    rank = max(tensors.rank(site), 1)
    wanted = {Part.A: (a, (rank, into)), Part.B: (b, (out, rank)), Part.MAGNITUDE: (magnitude, (out,))}
    for part, (info, shape) in wanted.items():
        if info is not None and (info.shape != shape or 0 in shape):
            key = tensors.keys[site][part]
            yield CorruptAdapterError(f"{key} has the shape {list(info.shape)}, and must have {list(shape)}")


def _check_full_weights(tensors: AdapterTensors, base: BaseShape | None) -> Iterator[AdapterError]:
    for module, key in tensors.full_weights.items():
        shape = tensors.infos[key].shape
        if base is not None and shape != (base.vocab_size, base.hidden_size):
            yield UnsupportedAdapterError(
                f"it replaces {module} by one of the shape {list(shape)}, which is not served (the base model's has "
                f"{[base.vocab_size, base.hidden_size]}): train without resizing or saving it"
            )


def scalings(tensors: AdapterTensors, settings: LoraSettings) -> tuple[dict[Site, float], list[AdapterError]]:
    """What each module's b @ a is multiplied with, from the ranks and alphas that the config gives it."""
    sites, paths = list(tensors.keys), [tensors.paths[site] for site in tensors.keys]
    try:
        ranks = pattern_values(settings.rank_pattern, paths, settings.rank)
        alphas = pattern_values(settings.alpha_pattern, paths, settings.alpha)
    except CorruptAdapterError as error:
        return {}, [error]
    problems: list[AdapterError] = []
    wrong = [site for site, rank in zip(sites, ranks, strict=True) if tensors.rank(site) not in (0, rank)]
    if wrong:
        rank = ranks[sites.index(wrong[0])]
        problems.append(
            CorruptAdapterError(
                f"config and tensors disagree on the rank of {listed([site.path for site in wrong])}: "
                f"{rank} and {tensors.rank(wrong[0])}; correct r or rank_pattern"
            )
        )
    found = [settings.scaling(rank, alpha) for rank, alpha in zip(ranks, alphas, strict=True)]
    return dict(zip(sites, found, strict=True)), problems


def check_settings(tensors: AdapterTensors, settings: LoraSettings, base: BaseShape | None) -> Iterator[AdapterError]:
    """Whether config and tensors speak of the same adapter."""
    with_magnitude = [site.path for site, parts in tensors.keys.items() if Part.MAGNITUDE in parts]
    without = [site.path for site, parts in tensors.keys.items() if Part.MAGNITUDE not in parts]
    if settings.use_dora and without:
        yield CorruptAdapterError(f"use_dora is set, but {listed(without)} have no DoRA magnitudes: save it again")
    if with_magnitude and not settings.use_dora:
        yield CorruptAdapterError(f"{listed(with_magnitude)} have DoRA magnitudes, but use_dora is not set: set it")
    tokens = settings.invocation_tokens or ()
    if tokens and Site(Module.EMBED_TOKENS) in tensors.keys:
        yield UnsupportedAdapterError("an activated LoRA can't change embed_tokens, in PEFT neither: train without it")
    if base is not None and (strange := [token for token in tokens if token >= base.vocab_size]):
        yield CorruptAdapterError(
            f"alora_invocation_tokens has {listed(map(str, strange))}, the base model has {base.vocab_size} tokens: "
            "load the adapter on the model that it was trained on"
        )
    yield from _check_targets(tensors, settings, base)


def _check_targets(tensors: AdapterTensors, settings: LoraSettings, base: BaseShape | None) -> Iterator[AdapterError]:
    """Whether the file has what the config asks for: all of the base model's modules that it targets, and no others."""
    if settings.target_modules is None or not tensors.keys:
        return
    present = [site for site in tensors.keys if not _is_tied_head(site, settings, base)]
    absent = [] if base is None else [site for site in base.layer_sites() if site not in tensors.keys]
    prefix = _decoder_prefix(tensors)
    paths = [tensors.paths[site] for site in present] + [prefix + site.path for site in absent]
    try:
        wanted = targeted(settings, paths)
    except CorruptAdapterError as error:
        yield error
        return
    if extra := [site.path for site, is_wanted in zip(present, wanted, strict=False) if not is_wanted]:
        yield CorruptAdapterError(f"the file changes {listed(extra)}, which target_modules doesn't name: save it again")
    if missing := [site.path for site, is_wanted in zip(absent, wanted[len(present) :], strict=True) if is_wanted]:
        yield CorruptAdapterError(f"target_modules names {listed(missing)}, which the file doesn't have: save it again")


def _is_tied_head(site: Site, settings: LoraSettings, base: BaseShape | None) -> bool:
    """With ensure_weight_tying PEFT adapts the output layer wherever it adapts the embedding that is its table."""
    is_tied = base is None or base.tied_embeddings
    return site.module is Module.LM_HEAD and settings.ensure_weight_tying and is_tied


def _decoder_prefix(tensors: AdapterTensors) -> str:
    """What stands before `layers.` in the model that was trained."""
    for site, path in tensors.paths.items():
        if site.layer is not None:
            return path.removesuffix(site.path)
    return "model."


def listed(names: Iterable[str], limit: int = 3) -> str:
    """The first of some names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _count(names: list[str]) -> str:
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''}"

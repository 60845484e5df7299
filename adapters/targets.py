"""Which modules adapter_config.json means, by PEFT's rules.

target_modules and exclude_modules are names or one regular expression; the keys of rank_pattern and alpha_pattern are
regular expressions. A regular expression can take longer than the age of the universe, and Python's can't be
interrupted, so those from a file that could are matched by a process of their own, with a time limit.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TypeVar

from mlserve.adapters.peft_config import LoraSettings
from mlserve.adapters.spec import Module
from mlserve.errors import CorruptAdapterError

__all__ = ["pattern_values", "targeted"]

MATCH_SECONDS = 5.0
ALL_LINEAR = "all-linear"

# Without repetition, alternatives and groups: takes no longer than the text is long.
_PLAIN = re.compile(r"\^?(?:[\w-]|\\?\.)*\$?", re.ASCII)
_CHILD = """
import json, re, sys
patterns, texts = json.load(sys.stdin)
compiled = [re.compile(pattern) for pattern in patterns]
print(json.dumps([next((i for i, p in enumerate(compiled) if p.fullmatch(text)), None) for text in texts]))
"""

T = TypeVar("T")


def pattern_values(patterns: Mapping[str, T], paths: Sequence[str], default: T) -> list[T]:
    """The value for each module path: that of the first pattern that matches the path or its last parts.

    Raises `CorruptAdapterError` for patterns that are none, or that take too long.
    """
    found = _first_matches([rf"(.*\.)?({key})" for key in patterns], paths, all(map(_PLAIN.fullmatch, patterns)))
    values = list(patterns.values())
    return [default if index is None else values[index] for index in found]


def targeted(settings: LoraSettings, paths: Sequence[str]) -> list[bool]:
    """Whether the config asks for an adapter on each of the modules. Raises `CorruptAdapterError` as above.

    layers_to_transform is only for names that are not the whole path.
    """
    excluded = _named(settings.exclude_modules, paths)
    if settings.target_modules == ALL_LINEAR:
        wanted = [path.rpartition(".")[2] not in (Module.LM_HEAD, Module.EMBED_TOKENS) for path in paths]
    elif isinstance(settings.target_modules, str):
        wanted = _named(settings.target_modules, paths)
    else:
        names = settings.target_modules or ()
        listed = _named(names, paths)
        wanted = [
            path in names or (is_listed and _in_layers(settings, path))
            for is_listed, path in zip(listed, paths, strict=True)
        ]
    return [is_wanted and not is_excluded for is_wanted, is_excluded in zip(wanted, excluded, strict=True)]


def _named(names: str | tuple[str, ...], paths: Sequence[str]) -> list[bool]:
    """Whether a path is one of the names or ends with one after a dot, or is matched as a whole by the pattern."""
    if isinstance(names, str):
        return [index is not None for index in _first_matches([names], paths, bool(_PLAIN.fullmatch(names)))]
    return [any(path == name or path.endswith(f".{name}") for name in names) for path in paths]


def _in_layers(settings: LoraSettings, path: str) -> bool:
    """Whether layers_to_transform has the layer of a path, which is the first number that follows a name."""
    if settings.layers_to_transform is None:
        return True
    match = re.search(r"(?:^|\.)([^.]+)\.([0-9]+)\.", path)
    if match is None or (settings.layers_pattern and match[1] not in settings.layers_pattern):
        return False
    return int(match[2]) in settings.layers_to_transform


def _first_matches(patterns: Sequence[str], texts: Sequence[str], are_plain: bool) -> list[int | None]:
    """For each text the index of the first pattern that it matches as a whole."""
    if not patterns:
        return [None] * len(texts)
    if not are_plain:
        return _first_matches_in_child(patterns, texts)
    compiled = [re.compile(pattern) for pattern in patterns]
    return [next((i for i, pattern in enumerate(compiled) if pattern.fullmatch(text)), None) for text in texts]


def _first_matches_in_child(patterns: Sequence[str], texts: Sequence[str]) -> list[int | None]:
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CHILD],
            input=json.dumps([patterns, texts]),
            capture_output=True,
            text=True,
            timeout=MATCH_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CorruptAdapterError(
            f"the config's patterns of module names take more than {MATCH_SECONDS} s: list the modules instead"
        ) from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise CorruptAdapterError(f"the config's patterns of module names are wrong ({reason}): save the adapter again")
    found: list[int | None] = json.loads(done.stdout)
    return found

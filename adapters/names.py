"""Names of adapters: which there can be, which a folder of adapters has, and what to say of one that isn't known."""

from __future__ import annotations

import os
from bisect import bisect
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from mlserve.adapters.checks import listed
from mlserve.adapters.folder import CONFIG_FILE
from mlserve.errors import AdapterNotFoundError, ConfigError

__all__ = ["check_name", "folder_names", "folder_of", "unknown_name"]

MAX_LENGTH = 256
MAX_LISTED = 500  # names of a directory
NEIGHBOURS = 32  # that an unknown name is compared with, before and after it: 50 microseconds each


def check_name(name: str) -> None:
    """Raises `ConfigError` for what can't be an adapter's name."""
    if not (isinstance(name, str) and name.isprintable() and 0 < len(name) <= MAX_LENGTH):
        shown = str(name)[:MAX_LENGTH]
        raise ConfigError(f"an adapter can't have the name {shown!r}: give 1 to {MAX_LENGTH} printable characters")


def folder_of(directory: Path, name: str) -> Path | None:
    """The folder of that name in a directory. Only plain names are looked for: nothing hidden, above or below."""
    path = directory / name
    # Unlike `Path.is_dir`, this is false for what can't be a path.
    return path if _is_plain(name) and os.path.isdir(path) else None


def folder_names(directory: Path) -> list[str]:
    """Names that `folder_of` finds and whose folders look like adapters, but not of more than `MAX_LISTED`; none if the
    directory can't be read."""
    with suppress(OSError), os.scandir(directory) as entries:
        names = (entry.name for entry in entries if _is_plain(entry.name))
        return list(islice((name for name in names if (directory / name / CONFIG_FILE).is_file()), MAX_LISTED))
    return []


def unknown_name(name: str, known: Sequence[str]) -> AdapterNotFoundError:
    """An error with the names that are most like it, of those near it in `known`, which is sorted; else with any."""
    shown = name[:MAX_LENGTH]
    place = bisect(known, shown)
    near = known[max(place - NEIGHBOURS, 0) : place + NEIGHBOURS]
    fact = f"no adapter has the name {shown!r}"
    if close := get_close_matches(shown, near):
        return AdapterNotFoundError(f"{fact}: use {' or '.join(map(repr, close))}, or load it")
    if known:
        return AdapterNotFoundError(f"{fact}: use another ({listed(known)}), or load it")
    return AdapterNotFoundError(f"{fact}, and there are no others: load it")


def _is_plain(name: str) -> bool:
    is_name = name.isprintable() and 0 < len(name) <= MAX_LENGTH
    return is_name and not name.startswith(".") and "/" not in name and "\\" not in name

"""Names of adapters and holds on them, as records; `registry.py` has the rules by which they change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mlserve.adapters.host import HostAdapter
from mlserve.adapters.store import Content
from mlserve.errors import AdapterError

__all__ = ["AdapterInfo", "AdapterLease", "Entry", "Load"]


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """What is known of a name. What only its files say is as they were last read, and None before."""

    name: str
    path: Path
    digest: bytes | None
    rank: int | None  # the largest of any module
    targets: str | None  # modules and their layers
    num_bytes: int | None  # in host memory
    is_loaded: bool  # it is in host memory
    is_pinned: bool
    num_leases: int  # that are open, waiting ones too


@dataclass(slots=True, eq=False)
class Entry:
    """One registration of a name."""

    name: str
    path: Path
    root: Path | None  # that no link may lead out of: the folder in which it was found by its name
    is_pinned: bool = False
    content: Content | None = None  # that was read last; it may have been evicted
    load: Load | None = None  # that will read it
    num_leases: int = 0

    @property
    def is_loaded(self) -> bool:
        return self.content is not None and self.content.adapter is not None

    def info(self) -> AdapterInfo:
        last = self.content
        return AdapterInfo(
            name=self.name,
            path=self.path,
            digest=None if last is None else last.digest,
            rank=None if last is None else last.rank,
            targets=None if last is None else last.targets,
            num_bytes=None if last is None else last.num_bytes,
            is_loaded=self.is_loaded,
            is_pinned=self.is_pinned,
            num_leases=self.num_leases,
        )


@dataclass(slots=True, eq=False)
class Load:
    """Where leases get their content from: a read that is to come or under way, or what came of it."""

    entry: Entry
    num_waiting: int = 0  # leases that are open
    outcome: Content | AdapterError | None = None  # each lease that waited counts as one of the content


class AdapterLease:
    """One user's hold on an adapter, made by `AdapterRegistry.lease`. Threads may share it."""

    __slots__ = ("_end", "is_closed", "load")

    def __init__(self, load: Load, end: Callable[[AdapterLease], None]) -> None:
        self.load = load
        self.is_closed = False  # set by `end`
        self._end = end

    def poll(self) -> HostAdapter | None:
        """The adapter, the same each time; None while it is being read.

        Raises `AdapterError` if that failed, `RuntimeError` once the lease is closed.
        """
        if self.is_closed:
            raise RuntimeError("the lease is closed, and its adapter may be gone: take another")
        outcome = self.load.outcome  # one look: it changes once, in another thread
        if isinstance(outcome, AdapterError):
            raise type(outcome)(*outcome.args)  # one raised twice would collect the frames of both
        return None if outcome is None else outcome.adapter

    def close(self) -> None:
        """End the use: the adapter may be evicted. Does nothing the second time."""
        self._end(self)

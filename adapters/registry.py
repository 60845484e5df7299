"""Adapters by name: where their files are, what of them is in memory, and who uses it.

A lease is one request's hold on an adapter. If the adapter isn't in memory, a thread reads it, and the request waits
for that without holding up others. Names are only labels: what a lease delivers is a content, and stays the same
whatever becomes of the name.
"""

from __future__ import annotations

import builtins
import threading
from pathlib import Path
from typing import Protocol

from mlserve.adapters.host import HostAdapter, read_host_adapter
from mlserve.adapters.lease import AdapterInfo, AdapterLease, Entry, Load
from mlserve.adapters.names import check_name, folder_names, folder_of, unknown_name
from mlserve.adapters.peft_format import BaseWeights
from mlserve.adapters.spec import AdapterLimits, BaseShape
from mlserve.adapters.store import AdapterStore, Content
from mlserve.adapters.worker import Worker
from mlserve.errors import AdapterError, AdapterLimitError, AdapterNotFoundError

__all__ = ["AdapterInfo", "AdapterLease", "AdapterRegistry", "Reader"]


class Reader(Protocol):
    """Reads an adapter: `read_host_adapter`, or what stands for it in a test."""

    def __call__(
        self, path: Path, base: BaseShape, limits: AdapterLimits, base_weights: BaseWeights, root: Path | None
    ) -> HostAdapter: ...


class AdapterRegistry:
    """All adapters of one base model. Threads may share it.

    Contents are kept by digest: names of equal content share one. They take up to `max_bytes`, and one more while it is
    read. Beyond that, contents that are neither leased nor pinned are evicted, the least recently used first; their
    names stay and are read again on the next lease.
    """

    def __init__(
        self,
        base: BaseShape,
        base_weights: BaseWeights,
        limits: AdapterLimits,
        *,
        max_bytes: int,
        directory: Path | None = None,
        reader: Reader = read_host_adapter,
    ) -> None:
        """With a `directory` the folders in it are adapters by their names, and known once they are asked for."""
        self._base = base
        self._base_weights = base_weights
        self._limits = limits
        self._directory = None if directory is None else directory.absolute()
        self._reader = reader
        self._store = AdapterStore(max_bytes)
        self._entries: dict[str, Entry] = {}
        lock = threading.Lock()  # guards everything here
        self._changed = threading.Condition(lock)
        self._worker: Worker[Load] = Worker(self._read_in_background, lock)
        self._num_changes = 0
        self._num_seen = 0  # of them by the last `wait`
        self._is_closed = False

    def register(self, name: str, path: str | Path) -> None:
        """Make a name known; the folder is read on first use. Takes the name from what had it, as `unload` does.

        Raises `ConfigError` for names that are empty, longer than 256 characters or not printable.
        """
        check_name(name)
        with self._changed:
            if name in self._entries:
                self._forget(name)
            self._entries[name] = Entry(name, Path(path).absolute(), None)

    def load(
        self, name: str, path: str | Path | None = None, *, pinned: bool = False, root: Path | None = None
    ) -> AdapterInfo:
        """Read an adapter now and give it a name, in place of what had it; running requests keep what they have.

        Without a path it is read from where the name was registered or found in the directory. A pinned name's content
        is not evicted; `pinned` holds until the name is loaded or registered again. With a `root` no file of the path's
        folder may lie outside of that, links or not. On any failure nothing changes.
        Raises `AdapterError` (`AdapterLimitError` if there is no room and none can be made), `AdapterNotFoundError` for
        an unknown name without a path, `ConfigError` as `register` does.
        """
        check_name(name)
        with self._changed:
            entry = self._find(name) if path is None else Entry(name, Path(path).absolute(), root)
        if entry is None:
            raise self._not_found(name)
        path, root = entry.path, entry.root
        content = self._read(path, root)
        with self._changed:
            entry = self._entries.get(name, entry)
            if not self._store.can_fit(content, unpinned=entry.content if entry.is_pinned else None):
                raise self._no_room(name, content.num_bytes)
            self._entries[name] = entry
            entry.path, entry.root = path, root
            content = self._attach(entry, content, pinned)
            if entry.load is not None:
                self._end(entry.load, content)
            self._tell()
            return entry.info()

    def unload(self, name: str) -> None:
        """Forget a name; its leases go on, waiting ones too. Raises `AdapterNotFoundError` if it is unknown."""
        with self._changed:
            if is_known := name in self._entries:
                self._forget(name)
        if not is_known:
            raise self._not_found(name)

    def list(self) -> builtins.list[AdapterInfo]:
        """The names that are registered, sorted; of those in the directory the ones in use so far."""
        with self._changed:
            return [self._entries[name].info() for name in sorted(self._entries)]

    def names(self) -> builtins.list[str]:
        """All names that can be asked for, sorted: those that are registered, and folders of the directory."""
        with self._changed:
            known = set(self._entries)
        if self._directory is not None:
            known.update(folder_names(self._directory))
        return sorted(known)

    def require(self, name: str) -> None:
        """Raises `AdapterNotFoundError` where `lease` would."""
        with self._changed:
            entry = self._find(name)
        if entry is None:
            raise self._not_found(name)

    def lease(self, name: str) -> AdapterLease:
        """A hold on the adapter of a name, which is read in the background unless it is in memory.

        The lease gets the content that the name has when reading ends. Raises `AdapterNotFoundError`.
        """
        with self._changed:
            entry = self._find(name)
            if entry is not None:
                self._entries[name] = entry
                return AdapterLease(self._load_for(entry), self._end_lease)
        raise self._not_found(name)

    def wait(self, timeout: float) -> None:
        """Sleep until a background load ends, a lease is closed or names change, at most for `timeout` seconds.

        What happened since the last call counts, so that one waiter misses nothing between a look and a wait.
        """
        with self._changed:
            seen = self._num_seen
            self._changed.wait_for(lambda: self._num_changes != seen, timeout)
            self._num_seen = self._num_changes

    def close(self) -> None:
        """End background loads, once a file that is being read has been; leases that wait, or would wait later, fail.

        What is in memory can still be leased.
        """
        with self._changed:
            self._is_closed = True
            for load in self._worker.jobs():
                self._worker.remove(load)
                self._end(load, _closed(load.entry.name))
            self._tell()
            thread = self._worker.thread
        if thread is not None:
            thread.join()

    def _end_lease(self, lease: AdapterLease) -> None:
        load = lease.load
        with self._changed:
            if lease.is_closed:
                return
            lease.is_closed = True
            load.entry.num_leases -= 1
            if isinstance(load.outcome, Content):
                self._store.release(load.outcome)
            elif load.outcome is None:
                load.num_waiting -= 1
                if not load.num_waiting and self._worker.remove(load):
                    load.entry.load = None
            self._tell()

    def _read(self, path: Path, root: Path | None) -> Content:
        """Raises `AdapterError`, whatever happens: a bad disk or too little memory is no reason to fail otherwise."""
        try:
            return Content.of(self._reader(path, self._base, self._limits, self._base_weights, root))
        except AdapterError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise AdapterError(f"the adapter in {str(path)!r} can't be loaded ({reason}): try again") from error

    def _read_in_background(self, load: Load) -> None:
        try:
            content = self._read(load.entry.path, load.entry.root)
        except AdapterError as error:
            with self._changed:
                if load.outcome is None:
                    # Without its traceback, which holds on to all that was read.
                    self._end(load, type(error)(*error.args))
            return
        with self._changed:
            while load.outcome is None:
                self._deliver(load, content)

    def _deliver(self, load: Load, content: Content) -> None:
        """End a load; but if somebody waits for it and there may be room later, wait for a change."""
        entry = load.entry
        is_known = self._entries.get(entry.name) is entry
        if self._is_closed or not (is_known or load.num_waiting):
            self._end(load, _closed(entry.name))
        elif self._store.can_fit(content):
            content = self._attach(entry, content, False) if is_known else self._store.put(content)
            self._end(load, content)
        elif load.num_waiting and content.num_bytes <= self._store.max_bytes - self._store.pinned_bytes:
            self._changed.wait()
        else:
            self._end(load, self._no_room(entry.name, content.num_bytes))

    def _not_found(self, name: str) -> AdapterNotFoundError:
        return unknown_name(name, self.names())

    def _no_room(self, name: str, num_bytes: int) -> AdapterLimitError:
        limit = self._store.max_bytes
        if num_bytes > limit:
            return AdapterLimitError(
                f"adapter {name!r} takes {num_bytes} bytes of memory, limit {limit}: raise max_adapter_memory"
            )
        return AdapterLimitError(
            f"adapter {name!r} takes {num_bytes} bytes of memory, and too many of the {limit} that there are hold "
            "adapters that are pinned or in use: raise max_adapter_memory, or unload some"
        )

    # What follows is called with the lock held.

    def _find(self, name: str) -> Entry | None:
        """The entry of a name, a new one if there is a folder of that name in the directory."""
        entry = self._entries.get(name)
        if entry is None and self._directory is not None:
            path = folder_of(self._directory, name)
            return None if path is None else Entry(name, path, self._directory)
        return entry

    def _forget(self, name: str) -> None:
        entry = self._entries.pop(name)
        self._let_go(entry)
        self._tell()

    def _let_go(self, entry: Entry) -> None:
        if entry.content is not None:
            self._store.remove_name(entry.content, entry.is_pinned)

    def _attach(self, entry: Entry, content: Content, is_pinned: bool) -> Content:
        """Give a name a content that was just read, and for which there is room; returns the one it shares."""
        is_new = content.digest not in self._store
        if is_new:
            self._let_go(entry)  # first, since this can make the room
        content = self._store.put(content)
        self._store.add_name(content, is_pinned)
        if not is_new:
            self._let_go(entry)  # last, since it may be the same content
        entry.content, entry.is_pinned = content, is_pinned
        return content

    def _load_for(self, entry: Entry) -> Load:
        """What a new lease waits for, or has already."""
        if entry.content is not None and entry.is_loaded:
            self._store.acquire(entry.content, 1)
            load = Load(entry, outcome=entry.content)
        elif self._is_closed:
            load = Load(entry, outcome=_closed(entry.name))
        else:
            load = entry.load or Load(entry)
            if entry.load is None:
                self._worker.add(load)
                entry.load = load
            load.num_waiting += 1
        entry.num_leases += 1
        return load

    def _end(self, load: Load, outcome: Content | AdapterError) -> None:
        entry = load.entry
        entry.load = None
        self._worker.remove(load)
        if isinstance(outcome, Content):
            self._store.acquire(outcome, load.num_waiting)
        elif entry.root is not None and entry.content is None and self._entries.get(entry.name) is entry:
            del self._entries[entry.name]  # a folder of the directory that never was an adapter
        load.outcome = outcome
        self._tell()

    def _tell(self) -> None:
        self._num_changes += 1
        self._changed.notify_all()


def _closed(name: str) -> AdapterError:
    return AdapterError(f"adapter {name!r} can't be loaded any more: the engine was closed, make another")

"""Small adapters in host memory, files of such that a test can change, hold up and break, and looks at registries."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from mlserve.adapters.host import HostAdapter, HostWeights
from mlserve.adapters.registry import AdapterInfo, AdapterLease, AdapterRegistry
from mlserve.adapters.spec import Module, Site
from mlserve.errors import AdapterError


def small_adapter(content: str, num_bytes: int = 8) -> HostAdapter:
    """An adapter whose digest is the text; `num_bytes` is a multiple of 8."""
    half = torch.zeros(1, num_bytes // 8)
    return HostAdapter(content.encode(), None, {Site(Module.Q_PROJ, 0): HostWeights(half, half.clone(), 1.0)})


class FakeFiles:
    """A reader for the registry: what each folder has, by its name, an adapter or an error."""

    def __init__(self, **contents: HostAdapter | Exception) -> None:
        self.contents = contents
        self.reads: list[str] = []
        self.has_begun = threading.Semaphore(0)
        self.may_end = threading.Event()
        self.may_end.set()
        self.slow = set(contents)  # those that wait for `may_end`

    def __call__(self, path: Path, *_: Any) -> HostAdapter:
        content = self.contents[path.name]
        self.reads.append(path.name)
        self.has_begun.release()
        assert path.name not in self.slow or self.may_end.wait(20)
        if isinstance(content, Exception):
            raise content
        return content


def arrived(registry: AdapterRegistry, lease: AdapterLease) -> HostAdapter:
    """The adapter of a lease, when it is there."""
    end = time.monotonic() + 20
    while (adapter := lease.poll()) is None:
        assert time.monotonic() < end
        registry.wait(0.1)
    return adapter


def use(registry: AdapterRegistry, name: str) -> HostAdapter:
    with closing(registry.lease(name)) as lease:
        return arrived(registry, lease)


def error_of(registry: AdapterRegistry, lease: AdapterLease) -> AdapterError:
    with pytest.raises(AdapterError) as raised:
        arrived(registry, lease)
    return raised.value


def info(registry: AdapterRegistry, name: str) -> AdapterInfo:
    return next(found for found in registry.list() if found.name == name)


def loaded(registry: AdapterRegistry) -> str:
    """The names in memory."""
    return "".join(found.name for found in registry.list() if found.is_loaded)


def evicted_next(registry: AdapterRegistry) -> str:
    return b"".join(registry._store.free_digests()).decode()

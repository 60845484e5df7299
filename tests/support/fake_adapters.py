"""Adapters without tensors, and a registry that has them at once or when a test says so."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from mlserve.errors import AdapterError, AdapterNotFoundError


@dataclass(frozen=True)
class FakeAdapter:
    """What the engine looks at."""

    digest: bytes
    invocation_tokens: tuple[int, ...] | None = None


def fake_adapter(content: str, invocation_tokens: tuple[int, ...] | None = None) -> FakeAdapter:
    """Equal contents have equal digests."""
    return FakeAdapter(hashlib.sha256(content.encode()).digest(), invocation_tokens)


class FakeLease:
    """Of the content that its name had when it was made."""

    def __init__(self, registry: FakeRegistry, name: str) -> None:
        self.registry = registry
        self.name = name
        self.adapter = registry.adapters[name]

    def poll(self) -> FakeAdapter | None:
        if self.name in self.registry.loading:
            return None
        if self.name in self.registry.failing:
            raise AdapterError(f"adapter {self.name!r} can't be loaded")
        return self.adapter

    def close(self) -> None:
        self.registry.leases.discard(self)


class FakeRegistry:
    """The names in `loading` aren't there yet, those in `failing` can't be loaded."""

    def __init__(self, **adapters: FakeAdapter) -> None:
        self.adapters = adapters
        self.loading: set[str] = set()
        self.failing: set[str] = set()
        self.leases: set[FakeLease] = set()
        self.waited = 0

    def names(self) -> list[str]:
        return sorted(self.adapters)

    def list(self) -> list[object]:
        return []

    def require(self, name: str) -> None:
        if name not in self.adapters:
            raise AdapterNotFoundError(f"there is no adapter {name!r}")

    def unload(self, name: str) -> None:
        self.require(name)
        del self.adapters[name]

    def lease(self, name: str) -> FakeLease:
        self.require(name)
        lease = FakeLease(self, name)
        self.leases.add(lease)
        return lease

    def wait(self, timeout: float) -> None:
        """Loading ends while somebody waits for it."""
        self.waited += 1
        self.loading.clear()

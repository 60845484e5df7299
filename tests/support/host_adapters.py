"""Small adapters in host memory, and files of such that a test can change, hold up and break."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch

from mlserve.adapters.host import HostAdapter, HostWeights
from mlserve.adapters.spec import Module, Site


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

    def __call__(self, path: Path, *_: Any) -> HostAdapter:
        content = self.contents[path.name]
        self.reads.append(path.name)
        self.has_begun.release()
        assert self.may_end.wait(20)
        if isinstance(content, Exception):
            raise content
        return content

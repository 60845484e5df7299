"""Waiting for what other threads do."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    """Poll until it holds; fails when it takes too long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not hold within {seconds} s"
        time.sleep(0.005)

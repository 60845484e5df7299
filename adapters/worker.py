"""Jobs in the background, one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["Worker"]

JobT = TypeVar("JobT", bound=Hashable)


class Worker(Generic[JobT]):
    """Does jobs in the order in which they come, in a daemon thread that lives only while there are any.

    Starting one takes 0.1 ms, and nothing has to be ended. All methods are called with the lock held.
    """

    def __init__(self, work: Callable[[JobT], None], lock: threading.Lock) -> None:
        """`work` is called without the lock, and must not raise."""
        self._work = work
        self._lock = lock
        self._jobs: dict[JobT, None] = {}
        self._thread: threading.Thread | None = None

    def add(self, job: JobT) -> None:
        """Do a job after those that are there."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="mlserve-adapters", daemon=True)
            thread.start()
            self._thread = thread
        self._jobs[job] = None

    def remove(self, job: JobT) -> bool:
        """Take a job back; false if it was begun, is done, or never came."""
        return self._jobs.pop(job, job) is None

    def jobs(self) -> list[JobT]:
        """Those not begun, in order."""
        return list(self._jobs)

    @property
    def thread(self) -> threading.Thread | None:
        """None if there is nothing to do."""
        return self._thread

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._thread = None
                    return
                job = next(iter(self._jobs))
                del self._jobs[job]
            self._work(job)
            del job  # nothing is held while the lock is waited for

"""Requests that wait for their adapter to be read. Nobody waits for them: they join the queue when it is there."""

from __future__ import annotations

from collections.abc import Iterator

from mlserve.adapters.host import HostAdapter
from mlserve.engine.sequence import EngineRequest
from mlserve.errors import AdapterError

__all__ = ["Arrivals"]


class Arrivals:
    """In order of arrival. Each of the requests has a lease."""

    def __init__(self) -> None:
        self._requests: dict[str, EngineRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: EngineRequest) -> None:
        """Let a request wait."""
        self._requests[request.request_id] = request

    def remove(self, request_id: str) -> None:
        """Forget a request; an unknown one is none."""
        self._requests.pop(request_id, None)

    def take(self) -> Iterator[tuple[EngineRequest, HostAdapter | AdapterError]]:
        """Those whose adapter has been read, or can't be. They wait no longer."""
        for request in list(self._requests.values()):
            assert request.lease is not None
            try:
                adapter = request.lease.poll()
            except AdapterError as error:
                del self._requests[request.request_id]
                yield request, error
                continue
            if adapter is not None:
                del self._requests[request.request_id]
                yield request, adapter

"""How many requests there may be: in the server, and of each tenant. What is too much is told when to come back."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter

from mlserve.server.auth import Principal
from mlserve.server.errors import ApiError

__all__ = ["Gate"]

BUSY_RETRY = 1  # seconds


class Gate:
    """Counts requests from their arrival to their end. Belongs to one event loop."""

    def __init__(self, max_requests: int) -> None:
        self.max_requests = max_requests
        self.num_requests = 0
        self._of_tenant: Counter[str] = Counter()
        self._rates = MovingWindowRateLimiter(MemoryStorage())

    @contextmanager
    def enter(self, principal: Principal) -> Iterator[None]:
        """Let a request in, for as long as the context lasts. Raises `ApiError` 429 if there are too many."""
        if self.num_requests >= self.max_requests:
            raise _too_many(f"the server has {self.num_requests} requests, its limit", BUSY_RETRY)
        tenant = principal.tenant
        if tenant is not None:
            self._check_tenant(tenant, principal)
            self._of_tenant[tenant] += 1
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1
            if tenant is not None:
                self._of_tenant[tenant] -= 1
                if not self._of_tenant[tenant]:
                    del self._of_tenant[tenant]

    def _check_tenant(self, tenant: str, principal: Principal) -> None:
        limit = principal.max_concurrent
        if limit is not None and self._of_tenant[tenant] >= limit:
            raise _too_many(f"{limit} requests of this tenant run, its limit", BUSY_RETRY)
        if principal.requests_per_minute is not None:
            rate = RateLimitItemPerMinute(principal.requests_per_minute)
            if not self._rates.hit(rate, tenant):
                reset = self._rates.get_window_stats(rate, tenant).reset_time
                raise _too_many(
                    f"this tenant sent {principal.requests_per_minute} requests in a minute, its limit",
                    max(1, round(reset - time.time())),
                )


def _too_many(fact: str, retry_after: int) -> ApiError:
    return ApiError(
        429,
        f"{fact}: try again in {retry_after} s",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(retry_after)},
    )

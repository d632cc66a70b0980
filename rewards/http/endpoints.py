"""Balances requests over the servers of a service: least busy first, failing servers are avoided for a while."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(eq=False)
class Endpoint:
    """One URL with the state of its server; times are on the clock of its `Endpoints`."""

    url: str
    num_in_flight: int = 0
    num_failures: int = 0  # in a row
    aside_until: float = 0.0
    last_used: int = 0


class Endpoints:
    """Balances over URLs by requests in flight; of equal URLs the longest unused is first.

    A URL that failed `max_failures` times in a row is set aside for `aside_s`; then one request at a time tests whether
    it is back. If all URLs are set aside, the one that is due first is used.
    """

    def __init__(
        self, urls: Sequence[str], *, max_failures: int, aside_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._endpoints = [Endpoint(url) for url in urls]
        self._max_failures = max_failures
        self._aside_s = aside_s
        self._clock = clock
        self._num_taken = 0

    def take(self) -> Endpoint:
        """Returns the endpoint of the next request. Release it with `succeeded`, `failed`, `rested` or `released`."""
        free = self._free()
        if free:
            endpoint = min(free, key=lambda e: (e.num_in_flight, e.last_used))
        else:
            endpoint = min(self._endpoints, key=lambda e: (e.aside_until, e.num_in_flight, e.last_used))
        self._num_taken += 1
        endpoint.last_used = self._num_taken
        endpoint.num_in_flight += 1
        return endpoint

    def is_any_free(self) -> bool:
        """Whether an endpoint is not set aside."""
        return bool(self._free())

    def succeeded(self, endpoint: Endpoint) -> None:
        endpoint.num_in_flight -= 1
        endpoint.num_failures = 0
        endpoint.aside_until = 0.0

    def failed(self, endpoint: Endpoint) -> None:
        """Releases the endpoint: its server is unreachable or broken."""
        endpoint.num_in_flight -= 1
        endpoint.num_failures += 1
        if endpoint.num_failures >= self._max_failures:
            endpoint.aside_until = self._clock() + self._aside_s

    def rested(self, endpoint: Endpoint, seconds: float) -> None:
        """Releases the endpoint: its healthy server asks for a pause of `seconds`."""
        endpoint.num_in_flight -= 1
        endpoint.aside_until = max(endpoint.aside_until, self._clock() + seconds)

    def released(self, endpoint: Endpoint) -> None:
        """Releases the endpoint without information about its server."""
        endpoint.num_in_flight -= 1

    def _free(self) -> list[Endpoint]:
        now = self._clock()
        return [e for e in self._endpoints if e.aside_until <= now and not self._is_on_trial(e)]

    def _is_on_trial(self, endpoint: Endpoint) -> bool:
        return endpoint.num_failures >= self._max_failures and endpoint.num_in_flight > 0

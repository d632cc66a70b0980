"""Futures: outcomes of accepted requests, and the clients that wait for them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from mobula.deploy.training_service.store.records import RequestOutcome


class Futures:
    """Outcomes by request id. The newest finished ones stay in memory; older ones are in the database."""

    def __init__(self, num_kept: int) -> None:
        self._num_kept = num_kept
        self._waiting: dict[str, asyncio.Future[RequestOutcome]] = {}
        self._finished: OrderedDict[str, RequestOutcome] = OrderedDict()

    def open(self, request_id: str) -> None:
        """Registers an accepted request."""
        if request_id not in self._waiting and request_id not in self._finished:
            self._waiting[request_id] = asyncio.get_running_loop().create_future()

    def finish(self, request_id: str, outcome: RequestOutcome) -> None:
        """Sets the outcome of a request and wakes its waiting clients."""
        future = self._waiting.pop(request_id, None)
        self._finished[request_id] = outcome
        while len(self._finished) > self._num_kept:
            self._finished.popitem(last=False)
        if future is not None:
            future.set_result(outcome)

    def is_known(self, request_id: str) -> bool:
        return request_id in self._waiting or request_id in self._finished

    async def wait(self, request_id: str, timeout_s: float) -> RequestOutcome | None:
        """Returns the outcome of a known request; None if it does not finish in time."""
        finished = self._finished.get(request_id)
        if finished is not None:
            return finished
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._waiting[request_id])
        except TimeoutError:
            return None

    def forget(self, request_id: str) -> None:
        """Drops a finished outcome."""
        self._finished.pop(request_id, None)

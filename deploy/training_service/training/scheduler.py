"""Scheduler: which requests of which models run next."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from mobula.deploy.training_service.store import RequestRecord
from mobula.deploy.training_service.training.execution import Execution, ModelQueue

WAITED_SHARE = 0.25  # of the last call
MAX_WAIT_S = 0.1


class Scheduler:
    """Runs the requests of all models.

    Forward and backward requests of the waiting models run together in one call of the learner at a time, within a
    budget of tokens. Tenants take turns: the tenant that was served last comes last. The other requests run one at a
    time for each model, beside the call.
    """

    def __init__(
        self,
        queues: Mapping[str, ModelQueue],
        execution: Execution,
        *,
        max_batch_tokens: int,
        count: Callable[[bytes], int],
    ) -> None:
        self._queues = queues
        self._execution = execution
        self._max_batch_tokens = max_batch_tokens
        self._count = count
        self._changed = asyncio.Event()
        self._is_computing = False
        self._order: list[str] = []  # tenants, the one to serve next first
        self._computed_at: dict[str, float] = {}  # model -> end of its last call
        self._call_s = 0.0  # duration of the last call
        self._waiting_since: float | None = None

    def wake(self) -> None:
        """Called when a request has arrived."""
        self._changed.set()

    async def run(self) -> None:
        """Runs requests until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._changed.wait()
                self._changed.clear()
                pause_s = self._execution.pause_s()
                if pause_s > 0:
                    asyncio.get_running_loop().call_later(pause_s, self.wake)
                    continue
                for job in self._jobs():
                    tasks.create_task(job)

    def _jobs(self) -> list[Coroutine[Any, Any, None]]:
        """Marks models as busy and returns what to run for them."""
        jobs: list[Coroutine[Any, Any, None]] = []
        ready: list[ModelQueue] = []
        for queue in self._queues.values():
            head = queue.head
            if queue.is_busy or head is None:
                continue
            if not self._execution.is_loaded(queue):
                jobs.append(self._job([queue], partial(self._execution.restore, queue)))
            elif head.kind.is_compute:
                ready.append(queue)
            else:
                jobs.append(self._job([queue], partial(self._execution.run, queue, head)))
        if ready and not self._is_computing and not self._waits_for_others(ready):
            batch = self._batch(ready)
            self._is_computing = True
            jobs.append(self._job([queue for queue, _ in batch], partial(self._computed, batch), is_compute=True))
        return jobs

    def _waits_for_others(self, ready: Sequence[ModelQueue]) -> bool:
        """Whether a model that computed a moment ago may still send its next request, to share the call.

        Without this wait, two clients that each wait for their results would take turns for ever.
        """
        now = time.monotonic()
        since = self._waiting_since = now if self._waiting_since is None else self._waiting_since
        ready_ids = {queue.model_id for queue in ready}
        recent = {m for m, at in self._computed_at.items() if now - at < 2 * self._call_s and m not in ready_ids}
        left_s = since + min(WAITED_SHARE * self._call_s, MAX_WAIT_S) - now
        if recent and left_s > 0:
            asyncio.get_running_loop().call_later(left_s, self.wake)
            return True
        self._waiting_since = None
        return False

    async def _computed(self, batch: Sequence[tuple[ModelQueue, Sequence[RequestRecord]]]) -> None:
        started = time.monotonic()
        await self._execution.compute(batch)
        now = time.monotonic()
        self._call_s = now - started
        self._computed_at = {m: at for m, at in self._computed_at.items() if now - at < 2 * self._call_s}
        self._computed_at |= dict.fromkeys((queue.model_id for queue, _ in batch), now)

    def _job(
        self, queues: list[ModelQueue], work: Callable[[], Awaitable[None]], *, is_compute: bool = False
    ) -> Coroutine[Any, Any, None]:
        for queue in queues:
            queue.is_busy = True

        async def job() -> None:
            try:
                await work()
            finally:
                for queue in queues:
                    queue.is_busy = False
                if is_compute:
                    self._is_computing = False
                self.wake()

        return job()

    def _batch(self, ready: list[ModelQueue]) -> list[tuple[ModelQueue, list[RequestRecord]]]:
        """Takes requests tenant by tenant, one model each in turn, until the budget is used."""
        suspects = [queue for queue in ready if queue.num_lost > 1]
        if suspects:  # alone, so that a request that ends the learner harms no other
            return [(suspects[0], suspects[0].computes()[:1])]
        waiting: dict[str, list[ModelQueue]] = {}
        for queue in ready:
            waiting.setdefault(queue.record.tenant, []).append(queue)
        self._order = [t for t in self._order if t in waiting] + [t for t in waiting if t not in self._order]
        batch: list[tuple[ModelQueue, list[RequestRecord]]] = []
        left = self._max_batch_tokens
        served: list[str] = []
        while waiting and left > 0:
            for tenant in [t for t in self._order if t in waiting]:
                queue = waiting[tenant].pop(0)
                if not waiting[tenant]:
                    del waiting[tenant]
                taken: list[RequestRecord] = []
                for request in queue.computes():
                    num_tokens = self._count(request.body)
                    if num_tokens > left and (batch or taken):
                        break
                    taken.append(request)
                    left -= num_tokens
                if taken:
                    batch.append((queue, taken))
                    served.append(tenant)
                if left <= 0:
                    break
        self._order = [t for t in self._order if t not in served] + list(dict.fromkeys(served))
        return batch

"""RewardService: the workers of one service of the reward pool, behind a bounded queue with batching."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mobula.cluster.errors import (
    DeadlineError,
    LostObjectError,
    LostReplyError,
    RewardError,
    StuckError,
    UnscoredGroupError,
    WorkerDiedError,
)
from mobula.cluster.runtime.ray_actors import answer
from mobula.cluster.workers.status import RestartPolicy
from mobula.cluster.workers.work_queue import Hosts, WorkerSlot, WorkQueue
from mobula.rewards.pool.worker import GroupOutcomes, Question


@dataclass(frozen=True)
class ServiceSettings:
    """Deadlines and sizes of one service. `timeout_s` bounds one call, including the wait for earlier calls."""

    start_s: float
    alive_s: float
    timeout_s: float
    max_batch: int  # groups per call
    max_in_flight: int  # calls per worker
    max_queued: int  # groups that wait for a worker
    max_attempts: int  # lost workers or replies per group


@dataclass(eq=False)
class _Waiting:
    question: Question
    result: asyncio.Future[GroupOutcomes]
    lost: list[str] = field(default_factory=list)  # reasons of lost workers or replies


class RewardService:
    """Scores groups on `RewardWorker` actors with the same components.

    An idle worker gets all waiting groups, up to `max_batch`: batches form while workers are busy, and no group waits
    for a batch. A busy worker gets full batches only: a smaller batch would wait there and could not grow. A worker
    that died or hangs is replaced. Its unanswered groups are sent again first, each in a separate call, because one of
    them may be the cause.
    """

    def __init__(
        self,
        role: str,
        workers: Sequence[Any],
        *,
        hosts: Hosts,
        restarts: RestartPolicy,
        settings: ServiceSettings,
        on_lost: Callable[[Exception], None],
    ) -> None:
        """`on_lost` is called for every loss of a worker, and with a LostReplyError for every lost reply."""
        self._role = role
        self._settings = settings
        self._on_lost = on_lost
        self._work = WorkQueue(
            role,
            workers,
            hosts,
            max_load=settings.max_in_flight,
            restarts=restarts,
            alive_s=settings.alive_s,
            join=self._join,
            on_lost=on_lost,
            may_pile_up=self._has_full_batch,
        )
        self.pool = self._work.pool
        self._queue: deque[_Waiting] = deque()
        self._room = asyncio.Semaphore(settings.max_queued)
        self._carriers: set[asyncio.Task[None]] = set()
        self._is_waiting = False  # a carrier task waits for a worker

    async def start(self) -> None:
        """Waits until the first workers are built. Raises the errors of `WorkQueue.start`."""
        await self._work.start()

    @property
    def workers(self) -> tuple[Any, ...]:
        return self._work.handles

    async def score(self, question: Question) -> GroupOutcomes:
        """Returns the outcomes for a group. Waits for space in the queue, then for a worker."""
        async with self._room:
            waiting = _Waiting(question, asyncio.get_running_loop().create_future())
            self._queue.append(waiting)
            self._carry()
            if self._has_full_batch():
                self._work.dispatch()
            try:
                return await waiting.result
            finally:
                if waiting in self._queue:  # the caller was cancelled
                    self._queue.remove(waiting)

    async def close(self) -> None:
        for carrier in self._carriers:
            carrier.cancel()
        await asyncio.gather(*self._carriers, return_exceptions=True)
        await self.pool.close()

    def _has_full_batch(self) -> bool:
        return len(self._queue) >= self._settings.max_batch

    def _carry(self, *, is_urgent: bool = False) -> None:
        """Starts a task that waits for a worker, if a group is queued and no task waits yet."""
        if self._is_waiting or not self._queue:
            return
        self._is_waiting = True
        task = asyncio.create_task(self._carry_batch(is_urgent), name=f"{self._role} carrier")
        self._carriers.add(task)
        task.add_done_callback(self._carriers.discard)

    async def _carry_batch(self, is_urgent: bool) -> None:
        batch: list[_Waiting] = []
        try:
            async with self._work.slot(is_urgent=is_urgent) as slot:
                self._is_waiting = False
                batch = self._next_batch()
                self._carry()
                if batch:
                    await self._deliver(slot, batch)
        except asyncio.CancelledError:
            _fail(batch, RewardError(f"the {self._role} service was closed"))
            raise
        except Exception as error:  # no caller waits for this task: the error goes to the callers of its groups
            if self._is_waiting and not batch:  # no worker will become free again
                self._is_waiting = False
                batch = [self._queue.popleft() for _ in range(len(self._queue))]
            _fail(batch, error)

    def _next_batch(self) -> list[_Waiting]:
        """Takes the groups of the next call; a group over which a worker was lost is sent alone."""
        size = min(len(self._queue), self._settings.max_batch)
        alone = next((i for i in range(size) if self._queue[i].lost), size)
        return [self._queue.popleft() for _ in range(min(size, max(1, alone)))]

    async def _deliver(self, slot: WorkerSlot, batch: Sequence[_Waiting]) -> None:
        what = f"{slot.name} to score {len(batch)} groups (timeouts.reward_s)"
        call = slot.handle.score.remote([waiting.question for waiting in batch])
        try:
            results = await answer(call, timeout_s=self._settings.timeout_s, what=what)
        except (WorkerDiedError, DeadlineError, StuckError) as error:
            loss = await self._work.failed(slot, error)
            if isinstance(loss, LostReplyError):
                self._on_lost(loss)
            self._again(batch, loss)
        except (LostObjectError, RewardError) as error:
            if len(batch) == 1:
                _fail(batch, error)
            for waiting in batch if len(batch) > 1 else ():  # one of them is the cause: send each in a separate call
                await self._deliver(slot, [waiting])
        else:
            for waiting, result in zip(batch, results, strict=True):
                if not waiting.result.done():
                    waiting.result.set_result(result)

    def _again(self, batch: Sequence[_Waiting], error: Exception) -> None:
        """Queues unanswered groups first. Groups over which too many workers or replies were lost fail."""
        for waiting in reversed(batch):
            waiting.lost.append(str(error))
            if len(waiting.lost) < self._settings.max_attempts:
                self._queue.appendleft(waiting)
            else:
                who = f"{len(waiting.lost)} {self._role} workers, or their answers,"
                _fail([waiting], UnscoredGroupError(f"{who} were lost over one group; last: {error}"))
        self._carry(is_urgent=True)

    async def _join(self, name: str, handle: Any) -> None:
        what = f"{name} to start (timeouts.start_s)"
        await answer(handle.ping.remote(), timeout_s=self._settings.start_s, what=what)


def _fail(batch: Sequence[_Waiting], error: Exception) -> None:
    for waiting in batch:
        if not waiting.result.done():
            waiting.result.set_exception(error)

"""RestartableReplay: the replay buffer as the driver sees it, whichever process plays it.

A buffer that dies or hangs is ended, and another one is made from the ledger: the same groups in the same order, the
same leases. What was under way is asked for again. The journal goes on in a new segment, and a record that is written
twice says nothing new.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol

from cluster.errors import DeadlineError
from cluster.records.arrow import RecordedGroup
from cluster.records.trajectory import ScoredGroup
from cluster.replay.buffer import DUPLICATE
from cluster.replay.ledger import Holdings, ReplayLedger
from cluster.roles import ReplayStats
from cluster.workers.restart_policy import RestartBudget
from cluster.workers.restartable_role import RestartableRole

_logger = logging.getLogger(__name__)

GATHER_S = 0.1  # how long a finished group waits for others before the buffer hears of them together


class Buffer(Protocol):
    """One process that plays the buffer: `cluster.replay.client.ReplayClient`."""

    async def reserve(self, group: ScoredGroup) -> None: ...

    async def make_ready(self, new: Sequence[ScoredGroup], group_ids: Sequence[str]) -> None: ...

    async def reject(self, group_id: str, reason: str) -> None: ...

    async def lease(self, group_ids: Sequence[str]) -> None: ...

    async def end_leases(self, group_ids: Sequence[str]) -> None: ...

    async def start(self) -> None:
        """Wait until the process answers."""
        ...

    async def restore(self, holdings: Holdings) -> None: ...

    async def reserve_all(self, groups: Sequence[ScoredGroup]) -> None: ...

    async def commit(self, version: int, groups: Sequence[ScoredGroup]) -> None: ...

    async def abort(self, groups: Sequence[ScoredGroup]) -> None: ...

    async def resume(self, version: int, group_ids: Sequence[str]) -> None: ...

    async def forget(self, version: int) -> None: ...

    async def recall(self, group_ids: Sequence[str]) -> dict[str, RecordedGroup]: ...

    async def exchange(self, group: ScoredGroup) -> None: ...

    async def is_alive(self) -> None: ...

    async def close(self) -> None: ...

    def kill(self) -> None:
        """End the process at once, whatever it does."""
        ...


class RestartableReplay:
    """Implements `cluster.roles.Replay`, `cluster.recovery.resume.JournalledReplay` and
    `cluster.recovery.lost_groups.Keeper`.

    The ledger knows of everything that the buffer holds, so where it sees room for a finished group there is room: the
    buffer then hears of the group a moment later, together with others, or by the `put` of its step. Nor does anybody
    wait for the buffer's answer to `put`, `take` and `release`: it hears of them in their order, and of `commit` and
    `abort` behind them. What fails there is raised by the next call.

    `reserve` may wait for the learner, so a deadline of its own travels; any other call that is not answered in time
    means that the buffer hangs.
    """

    def __init__(
        self,
        buffer: Buffer,
        spawn: Callable[[], Awaitable[Buffer]],
        *,
        max_bytes: float,
        take_s: float,
        budget: RestartBudget,
        on_lost: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`spawn()` starts the process of another buffer; `on_lost` is told `replay_died` or `replay_hung`.

        `max_bytes` is the buffer's own budget; `take` waits for rollouts for `take_s`.
        """
        self._buffer = buffer
        self._spawn = spawn
        self._max_bytes = max_bytes
        self._take_s = take_s
        self._ledger = ReplayLedger(clock)
        self._num_waiting = 0  # groups for which there is no room yet
        self._num_oversized = 0
        self._untold: dict[str, ScoredGroup] = {}  # reserved in the ledger; the buffer may not have heard of them
        self._telling: asyncio.Task[None] | None = None
        self._last: asyncio.Task[None] | None = None  # of what the buffer hears in order
        self._is_ready = asyncio.Event()  # set whenever a waiting `take` has to look again
        self._background: set[asyncio.Task[None]] = set()  # what the buffer has not answered and is not awaited
        self._failure: BaseException | None = None  # of something in the background
        self._restartable = RestartableRole("replay", self._bring_back, budget=budget, on_lost=on_lost, clock=clock)

    async def reserve(self, group: ScoredGroup) -> None:
        self._raise_failure()
        if self._ledger.has_seen(group.summary.group_id):
            self._ledger.num_rejected[DUPLICATE] += 1
            return
        self._num_oversized += group.summary.num_bytes > self._max_bytes
        if self._ledger.num_bytes + group.summary.num_bytes <= self._max_bytes:
            self._ledger.reserve(group)
            self._tell_soon(group)
        else:
            await self._wait_for_room(group)
            self._ledger.reserve(group)

    async def put(self, groups: Sequence[ScoredGroup]) -> None:
        for group in groups:
            if not self._ledger.is_reserved(group.summary.group_id):
                await self.reserve(group)
        self._raise_failure()
        self._ledger.put(_ids(groups))
        self._is_ready.set()
        self._in_turn(lambda: self._make_ready(_ids(groups)), "put groups into the buffer")

    async def reject(self, group_id: str, reason: str) -> None:
        self._untold.pop(group_id, None)
        await self._restartable.outliving(lambda: self._buffer.reject(group_id, reason))
        self._ledger.reject(group_id, reason)

    async def take(self, num_groups: int) -> list[ScoredGroup]:
        try:
            async with asyncio.timeout(self._take_s):
                await self._wait_for_ready(num_groups)
        except TimeoutError as error:
            raise DeadlineError(
                f"waited {self._take_s:g} s for replay/0 to hold {num_groups} finished groups, it has "
                f"{self._ledger.num_ready}"
            ) from error
        groups = self._ledger.take(num_groups)
        self._in_turn(lambda: self._lease(_ids(groups)), "lease groups of the buffer")
        return groups

    async def commit(self, version: int, groups: Sequence[ScoredGroup]) -> None:
        await self._turn()
        await self._restartable.outliving(lambda: self._buffer.commit(version, groups))

    async def release(self, groups: Sequence[ScoredGroup]) -> None:
        self._raise_failure()
        self._in_turn(lambda: self._end_leases(_ids(groups)), "release groups of the buffer")

    async def abort(self, groups: Sequence[ScoredGroup]) -> None:
        await self._turn()
        await self._restartable.outliving(lambda: self._buffer.abort(groups))
        self._ledger.abort(_ids(groups))
        self._is_ready.set()

    async def resume(self, version: int, group_ids: Sequence[str]) -> None:
        await self._restartable.outliving(lambda: self._buffer.resume(version, group_ids))

    async def forget(self, version: int) -> None:
        await self._restartable.outliving(lambda: self._buffer.forget(version))

    async def recall(self, group_ids: Sequence[str]) -> dict[str, RecordedGroup]:
        """What the journal has of these groups."""
        return await self._restartable.outliving(lambda: self._buffer.recall(group_ids))

    async def exchange(self, group: ScoredGroup) -> None:
        """Hold this group, which was taken already, instead of the lost one of its id."""
        self._ledger.exchange(group)
        await self._restartable.outliving(lambda: self._buffer.exchange(group))

    async def stats(self) -> ReplayStats:
        """What the ledger says, at once: who asks in every step must not wait for a process that shares its core."""
        self._raise_failure()
        return self._ledger.stats(num_waiting=self._num_waiting, num_oversized=self._num_oversized)

    def lose(self, error: Exception) -> None:
        """The buffer was found dead or silent."""
        self._restartable.lose(error)

    async def ping(self) -> None:
        """Return while the buffer's process lives; what was asked of one that has been replaced says nothing."""
        asked = self._buffer
        try:
            await asked.is_alive()
        except Exception:
            if self._buffer is asked:
                raise

    async def close(self) -> None:
        self._restartable.end()
        for task in list(self._background):
            task.cancel()
        await self._buffer.close()

    async def _wait_for_room(self, group: ScoredGroup) -> None:
        self._num_waiting += 1
        try:
            await self._restartable.outliving(lambda: self._buffer.reserve(group), is_patient=True)
        finally:
            self._num_waiting -= 1

    async def _wait_for_ready(self, num_groups: int) -> None:
        self._raise_failure()
        while self._ledger.num_ready < num_groups:
            self._is_ready.clear()
            await self._is_ready.wait()
            self._raise_failure()

    async def _make_ready(self, group_ids: Sequence[str]) -> None:
        new = [self._untold.pop(group_id) for group_id in group_ids if group_id in self._untold]
        await self._restartable.outliving(lambda: self._buffer.make_ready(new, group_ids))

    async def _lease(self, group_ids: Sequence[str]) -> None:
        await self._restartable.outliving(lambda: self._buffer.lease(group_ids))

    async def _end_leases(self, group_ids: Sequence[str]) -> None:
        await self._restartable.outliving(lambda: self._buffer.end_leases(group_ids))
        self._ledger.release(group_ids)

    def _in_turn(self, tell: Callable[[], Awaitable[None]], name: str) -> None:
        """Tell the buffer something, behind everything else that was to be told in turn."""
        before = self._last

        async def told() -> None:
            if before is not None:
                await asyncio.wait([before])
            await tell()

        self._last = self._go_on(told(), name)

    async def _turn(self) -> None:
        """Wait until the buffer has heard everything that was to be told in turn."""
        if self._last is not None:
            await asyncio.wait([self._last])
        self._raise_failure()

    def _go_on(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled():
            self._failure = self._failure or task.exception()
            self._is_ready.set()

    def _raise_failure(self) -> None:
        """Raises: WorkerDiedError: the buffer could not be restarted in a call that was not awaited."""
        if self._failure is not None:
            raise self._failure

    def _tell_soon(self, group: ScoredGroup) -> None:
        self._untold[group.summary.group_id] = group
        if self._telling is None or self._telling.done():
            self._telling = self._go_on(self._tell_after_a_moment(), "tell the buffer of finished groups")

    async def _tell_after_a_moment(self) -> None:
        await asyncio.sleep(GATHER_S)
        await self._tell()

    async def _tell(self) -> None:
        """Groups that are put or rejected meanwhile are duplicates to the buffer, which it passes over."""
        groups = list(self._untold.values())
        if groups:
            await self._restartable.outliving(lambda: self._buffer.reserve_all(groups))
        for group in groups:
            self._untold.pop(group.summary.group_id, None)

    async def _bring_back(self, error: Exception) -> None:
        self._buffer.kill()
        self._buffer = await self._spawn()
        await self._buffer.start()
        holdings = self._ledger.holdings()
        await self._buffer.restore(holdings)
        _logger.info(
            "the replay buffer is back with %d groups reserved, %d ready and %d leased",
            len(holdings.reserved),
            len(holdings.ready),
            len(holdings.leased),
        )


def _ids(groups: Sequence[ScoredGroup]) -> list[str]:
    return [group.summary.group_id for group in groups]

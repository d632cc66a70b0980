"""ReplayBuffer: finished groups wait here, first in, first out, until a step takes them under a lease.

It holds summaries, and references for its journal; the bytes stay in the object store. A caller that has the groups as
well, as the driver has in its ledger, speaks of them by id: `make_ready`, `lease`, `end_leases`. It is a plain asyncio
class, run as an async Ray actor whose `max_concurrency` leaves room beside all groups that may wait for room.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cluster.errors import LostObjectError
from cluster.records.arrow import RecordedGroup
from cluster.records.trajectory import ScoredGroup
from cluster.replay.journal_writer import GroupJournal, NoJournal
from cluster.replay.ledger import Holdings
from cluster.roles import ReplayStats

_logger = logging.getLogger(__name__)

DUPLICATE = "duplicate"


@dataclass(frozen=True)
class _Entry:
    group: ScoredGroup
    arrived_s: float


class ReplayBuffer:
    """Delivery is at least once, training at most once: a group id that was ever put is never ready a second time.

    A finished group is reserved, which takes room of the byte budget and has it journalled in the background, and is
    put once its step is known. `take` leases: a group comes back with `abort` or is forgotten with `release`; `commit`
    returns once what is trained, and the groups it was trained on, are on disk. `clock` gives seconds that never run
    backwards.
    """

    def __init__(
        self,
        *,
        journal: GroupJournal | None = None,
        max_bytes: float = math.inf,
        min_ready: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Groups wait for room while more than `max_bytes` are held and `min_ready` groups, one step, are ready."""
        self._journal = journal or NoJournal()
        self._max_bytes = max_bytes
        self._min_ready = min_ready
        self._clock = clock
        self._reserved: dict[str, _Entry] = {}
        self._ready: dict[str, _Entry] = {}  # in order
        self._leased: dict[str, _Entry] = {}
        self._seen: set[str] = set()
        self._journalled: dict[str, asyncio.Task[None]] = {}  # by group; done once it is on disk
        self._num_rejected: Counter[str] = Counter()
        self._num_bytes = 0  # of all groups that are reserved, ready or leased
        self._num_waiting = 0
        self._num_oversized = 0
        self._changed = asyncio.Condition()

    async def reserve(self, group: ScoredGroup) -> None:
        """Hold a finished group whose step is not known yet; returns once there is room for it.

        It does not wait for room while less than a step is ready: the learner could never make any. A group that is
        larger than the whole budget is let in like any other, and counted. One that was seen before is a duplicate.
        """
        group_id = group.summary.group_id
        if group_id in self._seen:
            self._num_rejected[DUPLICATE] += 1
            return
        self._seen.add(group_id)
        self._count_if_oversized(group)
        self._num_waiting += 1
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._has_room_for(group))
                self._reserved[group_id] = _Entry(group, self._clock())
                self._num_bytes += group.summary.num_bytes
        finally:
            self._num_waiting -= 1
        self._write_down(group)

    async def reserve_all(self, groups: Sequence[ScoredGroup]) -> None:
        """Reserve one group after the other."""
        for group in groups:
            await self.reserve(group)

    async def restore(self, holdings: Holdings) -> None:
        """Take over what a buffer before this one held, before any other call. The journal may lack some of it."""
        now = self._clock()
        for group in (*holdings.reserved, *holdings.ready, *holdings.leased):
            self._count_if_oversized(group)
            self._num_bytes += group.summary.num_bytes
            self._write_down(group)
        self._reserved = {group.summary.group_id: _Entry(group, now) for group in holdings.reserved}
        self._ready = {group.summary.group_id: _Entry(group, now) for group in holdings.ready}
        self._leased = {group.summary.group_id: _Entry(group, now) for group in holdings.leased}
        self._seen = set(holdings.seen)

    async def put(self, groups: Sequence[ScoredGroup]) -> None:
        """Make `groups` ready in this order, behind those that are; one that was not reserved yet is reserved first."""
        for group in groups:
            if group.summary.group_id not in self._reserved:
                await self.reserve(group)
            await self.make_ready((), (group.summary.group_id,))

    async def make_ready(self, new: Sequence[ScoredGroup], group_ids: Sequence[str]) -> None:
        """Reserve what is new, then make the reserved groups of `group_ids` ready in this order."""
        await self.reserve_all(new)
        async with self._changed:
            self._ready |= {i: self._reserved.pop(i) for i in group_ids if i in self._reserved}
            self._changed.notify_all()

    async def reject(self, group_id: str, reason: str) -> None:
        """Count a finished group that will not be trained on, and forget it if it is reserved; should it be put after
        all, it is a duplicate."""
        self._seen.add(group_id)
        async with self._changed:
            if (entry := self._reserved.pop(group_id, None)) is not None:
                self._num_bytes -= entry.group.summary.num_bytes
                self._journalled.pop(group_id)
                self._changed.notify_all()
        self._num_rejected[reason] += 1
        await self._journal.rejected(group_id, reason)

    async def take(self, num_groups: int) -> list[ScoredGroup]:
        """Wait until `num_groups` groups are ready and lease the oldest ones.

        A take that waits for a producer that died is cancelled by the caller that runs both; it then holds no lease.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._ready) >= num_groups)
            taken = list(self._ready)[:num_groups]
            self._lease(taken)
            return [self._leased[group_id].group for group_id in taken]

    async def lease(self, group_ids: Sequence[str]) -> None:
        """Lease these of the groups that are ready; one that is leased already stays so."""
        async with self._changed:
            self._lease(group_ids)

    async def commit(self, version: int, groups: Sequence[ScoredGroup]) -> None:
        """Write down that these leased groups, in this order, make `version`: from then on a kill cannot undo it.

        Raises:
            JournalError: this, or one of the groups before it, could not be written.
            LostObjectError: one of them went with its node before that.
        """
        for group in groups:
            self._refuse_without_lease(group.summary.group_id)
            self._write_again_if_lost(group.summary.group_id)
        await asyncio.gather(*(self._journalled[group.summary.group_id] for group in groups))
        await self._journal.trained(version, groups)

    async def release(self, groups: Sequence[ScoredGroup]) -> None:
        """The step that took these groups is done: forget them, and with them their bytes."""
        await self.end_leases([group.summary.group_id for group in groups])

    async def end_leases(self, group_ids: Sequence[str]) -> None:
        """`release`, by id."""
        async with self._changed:
            for group_id in group_ids:
                self._num_bytes -= self._end_lease(group_id).group.summary.num_bytes
                self._journalled.pop(group_id)
            self._changed.notify_all()

    async def abort(self, groups: Sequence[ScoredGroup]) -> None:
        """The step that took these groups failed: they are the first to be taken again, in the order given."""
        async with self._changed:
            entries = {group.summary.group_id: self._end_lease(group.summary.group_id) for group in groups}
            self._ready = {**entries, **self._ready}
            self._changed.notify_all()

    async def resume(self, version: int, group_ids: Sequence[str]) -> None:
        """Write down that the run goes on from `version` with these finished groups, before any other call."""
        await self._journal.resumed(version, group_ids)

    async def forget(self, version: int) -> None:
        """A checkpoint holds `version`: the journal need not."""
        await self._journal.forget(version)

    async def recall(self, group_ids: Sequence[str]) -> dict[str, RecordedGroup]:
        """What the journal has of these groups, whatever became of them since, once it has done what it can."""
        under_way = [self._journalled[group_id] for group_id in group_ids if group_id in self._journalled]
        await asyncio.gather(*under_way, return_exceptions=True)
        return await self._journal.read(group_ids)

    async def exchange(self, group: ScoredGroup) -> None:
        """Hold this group from now on, instead of the one of its id that is lost."""
        group_id = group.summary.group_id
        for entries in (self._reserved, self._ready, self._leased):
            if group_id in entries:
                lost = entries[group_id]
                entries[group_id] = replace(lost, group=group)
                self._num_bytes += group.summary.num_bytes - lost.group.summary.num_bytes
                self._write_down(group)

    async def stats(self) -> ReplayStats:
        entries = [*self._reserved.values(), *self._ready.values(), *self._leased.values()]
        now = self._clock()
        oldest = min(entries, key=lambda entry: entry.arrived_s, default=None)
        return ReplayStats(
            num_ready=len(self._ready),
            num_taken=len(self._leased),
            num_bytes=self._num_bytes,
            oldest_age_s=now - oldest.arrived_s if oldest else 0.0,
            num_rejected=dict(self._num_rejected),
            oldest_id=oldest.group.summary.group_id if oldest else None,
            num_waiting=self._num_waiting,
            num_oversized=self._num_oversized,
        )

    async def ping(self) -> None:
        """Answers once the buffer is there."""

    async def close(self) -> None:
        """Drop every reference."""
        self._reserved.clear()
        self._ready.clear()
        self._leased.clear()
        await asyncio.gather(*self._journalled.values(), return_exceptions=True)  # who commits a group hears of it
        await self._journal.close()

    def _write_down(self, group: ScoredGroup) -> None:
        """In the background; the journal does not write a group again that it has."""
        self._journalled[group.summary.group_id] = asyncio.ensure_future(self._journal.finished(group))

    def _write_again_if_lost(self, group_id: str) -> None:
        """A group that could not be had for the journal may be there again: the training role has fetched it."""
        written = self._journalled[group_id]
        if written.done() and isinstance(written.exception(), LostObjectError):
            self._write_down(self._leased[group_id].group)

    def _has_room_for(self, group: ScoredGroup) -> bool:
        return len(self._ready) < self._min_ready or self._num_bytes + group.summary.num_bytes <= self._max_bytes

    def _count_if_oversized(self, group: ScoredGroup) -> None:
        if group.summary.num_bytes <= self._max_bytes:
            return
        if self._num_oversized == 0:
            _logger.warning(
                "group %s has %d bytes, more than all groups together should have: raise replay.max_bytes=%d "
                "(others like it are only counted)",
                group.summary.group_id,
                group.summary.num_bytes,
                self._max_bytes,
            )
        self._num_oversized += 1

    def _lease(self, group_ids: Sequence[str]) -> None:
        self._leased |= {i: self._ready.pop(i) for i in group_ids if i in self._ready}
        self._changed.notify_all()

    def _end_lease(self, group_id: str) -> _Entry:
        self._refuse_without_lease(group_id)
        return self._leased.pop(group_id)

    def _refuse_without_lease(self, group_id: str) -> None:
        if group_id not in self._leased:
            raise ValueError(f"group {group_id} has no lease: take() leases, and release() or abort() ends it once")

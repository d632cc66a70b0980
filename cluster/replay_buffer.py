"""ReplayBuffer: finished groups wait here, first in, first out, until a step takes them under a lease.

It holds references and summaries; the bytes stay in the object store. It is a plain asyncio class, run as an async Ray
actor whose `max_concurrency` leaves room for one waiting `take` beside all `put`s.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.roles import ReplayStats
from cluster.trajectory import ScoredGroup

DUPLICATE = "duplicate"


@dataclass(frozen=True)
class _Entry:
    group: ScoredGroup
    arrived_s: float


class ReplayBuffer:
    """Delivery is at least once, training at most once: a group id that was ever put is never ready a second time.

    `take` leases: a group comes back with `abort` or is forgotten with `release`. `clock` gives seconds that never run
    backwards. Backpressure is the gate's affair: it admits no more groups than the steps within the bound can hold.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ready: dict[str, _Entry] = {}  # in order
        self._leased: dict[str, _Entry] = {}
        self._seen: set[str] = set()
        self._num_rejected: Counter[str] = Counter()
        self._arrived = asyncio.Condition()

    async def put(self, group: ScoredGroup) -> None:
        """Make `group` ready; a group id that was put before is counted as a duplicate and dropped."""
        group_id = group.summary.group_id
        async with self._arrived:
            if group_id in self._seen:
                self._num_rejected[DUPLICATE] += 1
                return
            self._seen.add(group_id)
            self._ready[group_id] = _Entry(group, self._clock())
            self._arrived.notify_all()

    async def reject(self, group_id: str, reason: str) -> None:
        """Count a finished group that will not be trained on; should it be put after all, it is a duplicate."""
        self._seen.add(group_id)
        self._num_rejected[reason] += 1

    async def take(self, num_groups: int) -> list[ScoredGroup]:
        """Wait until `num_groups` groups are ready and lease the oldest ones.

        A take that waits for a producer that died is cancelled by whoever runs both; it then holds no lease.
        """
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self._ready) >= num_groups)
            taken = list(self._ready)[:num_groups]
            for group_id in taken:
                self._leased[group_id] = self._ready.pop(group_id)
            return [self._leased[group_id].group for group_id in taken]

    async def release(self, groups: Sequence[ScoredGroup]) -> None:
        """The step that took these groups is done: forget them, and with them their bytes."""
        for group in groups:
            self._end_lease(group)

    async def abort(self, groups: Sequence[ScoredGroup]) -> None:
        """The step that took these groups failed: they are the first to be taken again, in the order given."""
        async with self._arrived:
            entries = {group.summary.group_id: self._end_lease(group) for group in groups}
            self._ready = {**entries, **self._ready}
            self._arrived.notify_all()

    async def stats(self) -> ReplayStats:
        entries = [*self._ready.values(), *self._leased.values()]
        now = self._clock()
        oldest = min(entries, key=lambda entry: entry.arrived_s, default=None)
        return ReplayStats(
            num_ready=len(self._ready),
            num_taken=len(self._leased),
            num_bytes=sum(entry.group.summary.num_bytes for entry in entries),
            oldest_age_s=now - oldest.arrived_s if oldest else 0.0,
            num_rejected=dict(self._num_rejected),
            oldest_id=oldest.group.summary.group_id if oldest else None,
        )

    async def ping(self) -> None:
        """Answers as long as the buffer lives."""

    async def close(self) -> None:
        """Drop every reference."""
        self._ready.clear()
        self._leased.clear()

    def _end_lease(self, group: ScoredGroup) -> _Entry:
        group_id = group.summary.group_id
        if group_id not in self._leased:
            raise ValueError(f"group {group_id} has no lease: take() leases, and release() or abort() ends it once")
        return self._leased.pop(group_id)

"""ReplayLedger: what the driver knows of the replay buffer's groups, enough to make another buffer as it was.

A rollout actor *returns* its groups, so the driver owns them and they outlive the buffer, which holds references.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cluster.records.trajectory import ScoredGroup
from cluster.roles import ReplayStats


@dataclass(frozen=True)
class Holdings:
    """Everything that a buffer holds; `ready` in order, `seen` every group id that ever came."""

    reserved: tuple[ScoredGroup, ...] = ()
    ready: tuple[ScoredGroup, ...] = ()
    leased: tuple[ScoredGroup, ...] = ()
    seen: frozenset[str] = frozenset()


class ReplayLedger:
    """Which groups are reserved, ready and leased. A lost buffer is restored from it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reserved: dict[str, ScoredGroup] = {}
        self._ready: dict[str, ScoredGroup] = {}  # in order
        self._leased: dict[str, ScoredGroup] = {}
        self._since: dict[str, float] = {}  # when each group that is held came, oldest first
        self._seen: set[str] = set()
        self.num_rejected: Counter[str] = Counter()
        self.num_bytes = 0  # of all groups that are held

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    def has_seen(self, group_id: str) -> bool:
        return group_id in self._seen

    def is_reserved(self, group_id: str) -> bool:
        return group_id in self._reserved

    def reserve(self, group: ScoredGroup) -> None:
        self._seen.add(group.summary.group_id)
        self._reserved[group.summary.group_id] = group
        self._since[group.summary.group_id] = self._clock()
        self.num_bytes += group.summary.num_bytes

    def put(self, group_ids: Iterable[str]) -> None:
        for group_id in group_ids:
            if group_id in self._reserved:
                self._ready[group_id] = self._reserved.pop(group_id)

    def reject(self, group_id: str, reason: str) -> None:
        self._seen.add(group_id)
        if (group := self._reserved.pop(group_id, None)) is not None:
            self.num_bytes -= group.summary.num_bytes
            del self._since[group_id]
        self.num_rejected[reason] += 1

    def take(self, num_groups: int) -> list[ScoredGroup]:
        """Lease the oldest of the ready groups."""
        taken = list(self._ready)[:num_groups]
        self._leased |= {group_id: self._ready.pop(group_id) for group_id in taken}
        return [self._leased[group_id] for group_id in taken]

    def release(self, group_ids: Iterable[str]) -> None:
        for group_id in group_ids:
            self.num_bytes -= self._leased.pop(group_id).summary.num_bytes
            del self._since[group_id]

    def abort(self, group_ids: Sequence[str]) -> None:
        self._ready = {**{group_id: self._leased.pop(group_id) for group_id in group_ids}, **self._ready}

    def exchange(self, group: ScoredGroup) -> None:
        """The group of this id was lost, and this is another one of its prompt."""
        group_id = group.summary.group_id
        for holder in (self._reserved, self._ready, self._leased):
            if group_id in holder:
                self.num_bytes += group.summary.num_bytes - holder[group_id].summary.num_bytes
                holder[group_id] = group

    def stats(self, *, num_waiting: int, num_oversized: int) -> ReplayStats:
        """What is held now, with the two numbers that are not the ledger's."""
        oldest = next(iter(self._since), None)
        return ReplayStats(
            num_ready=len(self._ready),
            num_taken=len(self._leased),
            num_bytes=self.num_bytes,
            oldest_age_s=0.0 if oldest is None else self._clock() - self._since[oldest],
            num_rejected=dict(self.num_rejected),
            oldest_id=oldest,
            num_waiting=num_waiting,
            num_oversized=num_oversized,
        )

    def holdings(self) -> Holdings:
        return Holdings(
            reserved=tuple(self._reserved.values()),
            ready=tuple(self._ready.values()),
            leased=tuple(self._leased.values()),
            seen=frozenset(self._seen),
        )

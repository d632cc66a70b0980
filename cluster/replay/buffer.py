"""ReplayBuffer: groups that wait for the learner."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from mobula.cluster.errors import ChangedDataError, DeadlineError, JournalError, LostObjectError
from mobula.cluster.records.arrow import RecordedGroup
from mobula.cluster.records.trajectory import GroupOutcome, ScoredGroup, TrajectoryGroup
from mobula.cluster.replay.journal import NO_SECONDS, Seconds
from mobula.cluster.replay.journal_writer import GroupJournal
from mobula.cluster.roles import Prompts, ReplayStats
from mobula.cluster.tracing.tracer import UNTRACED, RunTracer, Stage

_logger = logging.getLogger(__name__)


@dataclass(eq=False)
class LiveGroups:
    """Records hold no images, so each prompt is rebuilt from its id. The rebuilt prompt must equal the recorded one."""

    prompts: Prompts
    put: Callable[[Any], Any]  # stores a value; returns a reference for `mobula.cluster.runtime.object_store.fetch`

    def revive(self, recorded: RecordedGroup) -> ScoredGroup:
        """Returns the group as it was before it was recorded."""
        group = recorded.group
        if not recorded.has_all_media:
            raise ChangedDataError(
                f"group {group.group_id} has images of later turns that its record does not hold: it can only "
                "be sampled again"
            )
        prompt = self.prompts.prompt_at(self.prompts.index_of(group.group_id))
        is_equal = {
            "tokens": np.array_equal(prompt.expanded_ids, group.prompt.expanded_ids)
            and np.array_equal(prompt.compact_ids, group.prompt.compact_ids),
            "images": prompt.media == group.prompt.media and prompt.media_spans == group.prompt.media_spans,
        }
        changed = [name for name, equal in is_equal.items() if not equal]
        if changed:
            raise ChangedDataError(
                f"prompt {group.prompt.prompt_id} has other {' and '.join(changed)} than when it was sampled: "
                f"restore the row {group.prompt.sample_id} and its images, or the data.* keys, as they were"
            )
        live = TrajectoryGroup(prompt, group.trajectories)
        logprobs = recorded.reference_logprobs
        return ScoredGroup(
            summary=live.summary(),
            group=self.put(live),
            rewards=recorded.rewards,
            reference_logprobs=None if logprobs is None else self.put(list(logprobs)),
        )


# ReplayBuffer: a FIFO queue of finished groups, from which training steps lease groups.
#
# The buffer runs in the driver process, which owns the groups. It holds references; the bytes stay in the object store.

DUPLICATE = "duplicate"


@dataclass
class _Entry:
    group: ScoredGroup
    since_s: float
    written: asyncio.Task[None]  # done once the group is on disk in the journal


@dataclass(eq=False, kw_only=True)
class ReplayBuffer:
    """A FIFO queue of finished groups, from which training steps lease groups.

    Delivery is at least once, training at most once: a group id can be put only once.

    `reserve` charges a finished group to the byte budget and starts its journal record. `put` makes the group ready
    once its step is known. `take` leases groups; `abort` returns them to the queue, `release` removes them. `commit`
    returns once the step and its groups are on disk. `clock` is monotonic, in seconds.
    """

    journal: GroupJournal = field(default_factory=GroupJournal)
    max_bytes: float = math.inf  # groups wait for room while more are held and `min_ready` groups are ready
    min_ready: int = 1  # groups of one step
    room_s: float | None = None  # of that wait; None waits without limit, in all three
    take_s: float | None = None  # of the wait of `take` for groups
    close_s: float | None = None  # of the wait of `close` for the journal
    clock: Callable[[], float] = time.monotonic
    tracer: RunTracer = UNTRACED

    def __post_init__(self) -> None:
        self._held: dict[str, _Entry] = {}  # by group id, oldest first; reserved, ready or leased
        self._reserved: set[str] = set()
        self._ready: dict[str, None] = {}  # in order
        self._leased: set[str] = set()
        self._seen: set[str] = set()
        self._num_rejected: Counter[str] = Counter()
        self._num_bytes = 0  # of all held groups
        self._waiting: set[str] = set()  # for room
        self._num_oversized = 0
        self._changed = asyncio.Event()

    async def reserve(self, group: ScoredGroup) -> None:
        """Holds a finished group whose step is not known yet. Waits for room in the byte budget.

        Does not wait while less than a step is ready: the learner could not free any room. A group larger than the
        whole budget is accepted and counted. A group id that was seen before is a duplicate.
        """
        group_id = group.summary.group_id
        if group_id in self._seen or group_id in self._waiting:
            self._num_rejected[DUPLICATE] += 1
            return
        self.tracer.begin(group_id, Stage.BUFFERED)
        self._count_if_oversized(group)
        if not self._has_room_for(group):
            await self._wait_for_room(group)
        self._seen.add(group_id)
        self._held[group_id] = _Entry(group, self.clock(), self._write_down(group))
        self._reserved.add(group_id)
        self._num_bytes += group.summary.num_bytes

    async def put(self, groups: Sequence[ScoredGroup]) -> None:
        """Appends `groups` to the ready groups, in this order. Reserves groups that are not reserved yet."""
        for group in groups:
            group_id = group.summary.group_id
            if group_id not in self._reserved:
                await self.reserve(group)
            if group_id in self._reserved:  # else the group is a duplicate
                self._reserved.remove(group_id)
                self._ready[group_id] = None
                self._changed.set()

    async def reject(self, outcome: GroupOutcome, reason: str) -> None:
        """Counts a finished group as rejected and removes it if it is reserved. A later `put` of the group is a
        duplicate."""
        group_id = outcome.group_id
        self.tracer.finish(group_id, outcome=reason)
        self._seen.add(group_id)
        if group_id in self._reserved:
            self._reserved.remove(group_id)
            self._forget(group_id)
        self._num_rejected[reason] += 1
        await self.journal.rejected(outcome, reason)

    async def take(self, num_groups: int) -> list[ScoredGroup]:
        """Waits until `num_groups` groups are ready and leases the oldest. The caller cancels the take if the producer
        dies. A cancelled take holds no lease."""
        try:
            # All leases are taken after the wait, without an await: a cancelled take holds none.
            async with asyncio.timeout(self.take_s):
                await self._until(lambda: len(self._ready) >= num_groups)
        except TimeoutError as error:
            raise DeadlineError(
                f"waited {self.take_s:g} s for the replay buffer to hold {num_groups} finished groups, it has "
                f"{len(self._ready)}"
            ) from error
        taken = list(islice(self._ready, num_groups))
        for group_id in taken:
            del self._ready[group_id]
            self.tracer.end(group_id, Stage.BUFFERED)
        self._leased.update(taken)
        self._changed.set()
        return [self._held[group_id].group for group_id in taken]

    async def commit(self, version: int, groups: Sequence[ScoredGroup], seconds: Seconds = NO_SECONDS) -> None:
        """Records in the journal that these leased groups make `version`, in order. The step then survives a kill.
        `seconds` are the phases of the step so far."""
        leased = [self._leased_group(group.summary.group_id) for group in groups]
        for held in leased:
            if held.written.done() and isinstance(held.written.exception(), LostObjectError):
                # Retry: the learner has fetched the group, so it may be available.
                held.written = self._write_down(held.group)
        await asyncio.gather(*(held.written for held in leased))
        await self.journal.trained(version, groups, seconds)

    async def release(self, groups: Sequence[ScoredGroup]) -> None:
        """Removes the groups of a completed step and frees their bytes."""
        for group in groups:
            self._end_lease(group.summary.group_id)
            self._forget(group.summary.group_id)
            self.tracer.finish(group.summary.group_id, outcome=Stage.TRAINED.value)

    async def abort(self, groups: Sequence[ScoredGroup]) -> None:
        """Returns the groups of a failed step to the front of the queue, in the given order."""
        for group in groups:
            self._end_lease(group.summary.group_id)
        self._ready = {**dict.fromkeys(group.summary.group_id for group in groups), **self._ready}
        self._changed.set()

    async def recall(self, group_ids: Sequence[str]) -> dict[str, RecordedGroup]:
        """Returns the journal records of these groups, in any state. First waits for pending writes, successful or
        not."""
        under_way = [self._held[group_id].written for group_id in group_ids if group_id in self._held]
        await asyncio.gather(*under_way, return_exceptions=True)
        return await self.journal.read(group_ids)

    async def exchange(self, group: ScoredGroup) -> None:
        """Replaces the lost group with the same id."""
        held = self._held.get(group.summary.group_id)
        if held is not None:
            self._num_bytes += group.summary.num_bytes - held.group.summary.num_bytes
            held.group, held.written = group, self._write_down(group)

    async def stats(self) -> ReplayStats:
        oldest = next(iter(self._held.items()), None)
        return ReplayStats(
            num_ready=len(self._ready),
            num_taken=len(self._leased),
            num_bytes=self._num_bytes,
            oldest_age_s=self.clock() - oldest[1].since_s if oldest else 0.0,
            num_rejected=dict(self._num_rejected),
            oldest_id=oldest[0] if oldest else None,
            num_waiting=len(self._waiting),
            num_oversized=self._num_oversized,
        )

    async def close(self) -> None:
        """Waits for writes to the journal in progress, then drops every reference."""
        writing = [held.written for held in self._held.values()]
        if writing:
            await asyncio.wait(writing, timeout=self.close_s)
        self._held.clear()
        try:
            await self.journal.close()
        except (JournalError, OSError):  # the run is over: do not mask its result or error
            _logger.warning("the journal was not closed: groups that were not trained may be missing", exc_info=True)

    def _write_down(self, group: ScoredGroup) -> asyncio.Task[None]:
        """Writes a group to the journal in the background. The journal skips groups that it already has."""
        writing = asyncio.ensure_future(self.journal.finished(group))
        writing.add_done_callback(_retrieve)
        return writing

    def _has_room_for(self, group: ScoredGroup) -> bool:
        # With less than a step ready, waiting for room would wait for a step that cannot begin.
        return len(self._ready) < self.min_ready or self._num_bytes + group.summary.num_bytes <= self.max_bytes

    async def _wait_for_room(self, group: ScoredGroup) -> None:
        group_id = group.summary.group_id
        self._waiting.add(group_id)
        try:
            async with asyncio.timeout(self.room_s):
                await self._until(lambda: self._has_room_for(group))
        except TimeoutError as error:
            raise DeadlineError(
                f"waited {self.room_s:g} s for the replay buffer to make room for group {group_id} "
                f"(timeouts.backpressure_s): it holds {self._num_bytes} bytes, replay.max_bytes={self.max_bytes:.0f}"
            ) from error
        finally:
            self._waiting.remove(group_id)

    async def _until(self, is_true: Callable[[], bool]) -> None:
        while not is_true():
            self._changed.clear()
            await self._changed.wait()

    def _count_if_oversized(self, group: ScoredGroup) -> None:
        if group.summary.num_bytes <= self.max_bytes:
            return
        if self._num_oversized == 0:
            _logger.warning(
                "group %s has %d bytes, more than all groups together should have: raise replay.max_bytes=%d "
                "(others like it are only counted)",
                group.summary.group_id,
                group.summary.num_bytes,
                self.max_bytes,
            )
        self._num_oversized += 1

    def _leased_group(self, group_id: str) -> _Entry:
        if group_id not in self._leased:
            raise ValueError(f"group {group_id} has no lease: take() leases, and release() or abort() ends it once")
        return self._held[group_id]

    def _end_lease(self, group_id: str) -> None:
        self._leased_group(group_id)
        self._leased.remove(group_id)

    def _forget(self, group_id: str) -> None:
        self._num_bytes -= self._held.pop(group_id).group.summary.num_bytes
        self._changed.set()


def _retrieve(writing: asyncio.Task[None]) -> None:
    """Discards the error of a write: `commit` raises errors of trained groups, other errors affect no caller."""
    if not writing.cancelled():
        writing.exception()

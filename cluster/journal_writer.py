"""The journal as the replay buffer writes it: from an event loop, in order, with one sync for all that wait."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, Protocol

from cluster import journal as records
from cluster.journal import Journal
from cluster.journal_segments import Record
from cluster.objects import fetch_or_miss
from cluster.trajectory import ScoredGroup, TrajectoryGroup
from cluster.trajectory_records import RecordedGroup


class GroupJournal(Protocol):
    """Where the buffer writes down what became of groups; every call returns once it is on disk."""

    async def finished(self, group: ScoredGroup) -> None: ...

    async def rejected(self, group_id: str, reason: str) -> None: ...

    async def trained(self, version: int, groups: Sequence[ScoredGroup]) -> None: ...

    async def resumed(self, version: int, group_ids: Sequence[str]) -> None: ...

    async def forget(self, version: int) -> None:
        """A checkpoint holds `version`."""
        ...

    async def read(self, group_ids: Sequence[str]) -> dict[str, RecordedGroup]:
        """Those of the groups that were written down."""
        ...

    async def close(self) -> None: ...


class NoJournal:
    """Nothing is written down."""

    async def finished(self, group: ScoredGroup) -> None: ...

    async def rejected(self, group_id: str, reason: str) -> None: ...

    async def trained(self, version: int, groups: Sequence[ScoredGroup]) -> None: ...

    async def resumed(self, version: int, group_ids: Sequence[str]) -> None: ...

    async def forget(self, version: int) -> None: ...

    async def read(self, group_ids: Sequence[str]) -> dict[str, RecordedGroup]:
        return {}

    async def close(self) -> None: ...


class JournalWriter:
    """Writes a `Journal` on a thread of its own, so that the event loop never waits for a disk.

    Records that come in while the disk is busy are written together afterwards and share one sync (group commit). It
    may be sent to another process before it is used.
    """

    def __init__(
        self, journal: Journal, *, timeout_s: float, start_thread: Callable[[], Executor] | None = None
    ) -> None:
        """`timeout_s` bounds the fetch of one group. `start_thread` gives an executor that runs one job at a time."""
        self._journal = journal
        self._timeout_s = timeout_s
        self._start_thread = start_thread or _one_thread
        self._executor: Executor | None = None
        self._waiting: deque[tuple[Record, Future[None]]] = deque()

    async def finished(self, group: ScoredGroup) -> None:
        await self._append(lambda: records.finished(self._group(group), group.rewards))

    async def rejected(self, group_id: str, reason: str) -> None:
        await self._append(lambda: records.rejected(group_id, reason))

    async def trained(self, version: int, groups: Sequence[ScoredGroup]) -> None:
        await self._append(lambda: self._trained(version, groups))

    async def resumed(self, version: int, group_ids: Sequence[str]) -> None:
        await self._append(lambda: records.resumed(version, group_ids))

    async def forget(self, version: int) -> None:
        await asyncio.wrap_future(self._thread().submit(self._journal.forget, version))

    async def read(self, group_ids: Sequence[str]) -> dict[str, RecordedGroup]:
        return await asyncio.wrap_future(self._thread().submit(self._journal.read, group_ids))

    async def close(self) -> None:
        await asyncio.wrap_future(self._thread().submit(self._journal.close))

    async def _append(self, make: Callable[[], Record]) -> None:
        record = await asyncio.to_thread(make)
        written: Future[None] = Future()
        self._waiting.append((record, written))
        self._thread().submit(self._write_waiting)
        await asyncio.wrap_future(written)

    def _write_waiting(self) -> None:
        """On the writer's thread: write what has come in by now."""
        batch: list[tuple[Record, Future[None]]] = []
        while self._waiting:
            batch.append(self._waiting.popleft())
        if not batch:
            return  # a job before this one wrote it
        wanted = [written for _, written in batch if written.set_running_or_notify_cancel()]
        try:
            self._journal.append([record for record, _ in batch])
        except Exception as error:
            for written in wanted:
                written.set_exception(error)
        else:
            for written in wanted:
                written.set_result(None)

    def _group(self, group: ScoredGroup) -> TrajectoryGroup:
        [value] = self._fetch([group.group], f"group {group.summary.group_id} for the journal")
        return value

    def _trained(self, version: int, groups: Sequence[ScoredGroup]) -> Record:
        logprobs = self._fetch([group.reference_logprobs for group in groups], "reference log-probs for the journal")
        return records.trained(version, [group.summary.group_id for group in groups], logprobs)

    def _fetch(self, references: Sequence[Any], what: str) -> list[Any]:
        return fetch_or_miss(references, timeout_s=self._timeout_s, what=what)

    def _thread(self) -> Executor:
        if self._executor is None:
            self._executor = self._start_thread()
        return self._executor


def _one_thread() -> Executor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")

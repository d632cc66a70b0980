"""JournalWriter: writes the replay buffer's records to the journal on a thread, in order, with group commit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, TypeVar

from mobula.cluster.errors import JournalError
from mobula.cluster.records.arrow import RecordedGroup
from mobula.cluster.records.trajectory import GroupOutcome, ScoredGroup
from mobula.cluster.replay.journal import (
    NO_SECONDS,
    Journal,
    JournalRecord,
    Seconds,
    evaluated,
    finished,
    rejected,
    resumed,
    trained,
)
from mobula.cluster.runtime.concurrency import DaemonThread
from mobula.cluster.runtime.object_store import fetch_at_hand, fetch_or_miss

T = TypeVar("T")
WAIT_S = 0.05  # for groups that are not available yet: delays all records of one write
MAX_TOGETHER = 32  # records in one write, whose groups are in memory together
MAX_LATE = 8  # concurrent waits for unavailable groups


class GroupJournal:
    """Log of the buffer's groups. Every call returns once its records are on disk. This base writes nothing."""

    async def finished(self, group: ScoredGroup) -> None: ...

    async def rejected(self, outcome: GroupOutcome, reason: str) -> None: ...

    async def evaluated(self, version: int, evaluation: Mapping[str, Any]) -> None: ...

    async def trained(self, version: int, groups: Sequence[ScoredGroup], seconds: Seconds = NO_SECONDS) -> None: ...

    async def resumed(self, version: int, group_ids: Sequence[str]) -> None: ...

    async def forget(self, version: int) -> None:
        """Removes records that the checkpoint of `version` covers."""

    async def read(self, group_ids: Sequence[str]) -> dict[str, RecordedGroup]:
        """Returns the records of the groups found in the journal."""
        return {}

    async def close(self) -> None: ...


@dataclass(frozen=True)
class _Draft:
    """A record to be built by `make` from the values of `references`."""

    make: Callable[..., JournalRecord]
    references: Sequence[Any] = ()
    what: str = ""  # they are


@dataclass(eq=False)
class JournalWriter(GroupJournal):
    """Writes a `Journal` on its own thread, so that the event loop never waits for a disk.

    Records that arrive while the thread is busy share the next fetch and sync (group commit). Other threads wait for
    groups that are unavailable, such as groups lost with a node; these waits do not delay other records. A disk that
    does not answer in time raises an error and does not block the exit of the process.
    """

    journal: Journal
    _: KW_ONLY
    timeout_s: float  # of the fetch of one group
    write_s: float | None = None  # of each disk access; None: unbounded
    start_thread: Callable[[], Executor] | None = None  # returns an executor that runs one job at a time

    def __post_init__(self) -> None:
        self._thread = DaemonThread("journal") if self.start_thread is None else self.start_thread()
        self._late = ThreadPoolExecutor(MAX_LATE, thread_name_prefix="journal-late")
        self._waiting: list[tuple[_Draft, asyncio.Future[bool]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def finished(self, group: ScoredGroup) -> None:
        what = f"group {group.summary.group_id} for the journal"
        await self._append(_Draft(lambda fetched: finished(fetched, group.rewards), [group.group], what))

    async def rejected(self, outcome: GroupOutcome, reason: str) -> None:
        await self._append(_Draft(lambda: rejected(outcome, reason)))

    async def evaluated(self, version: int, evaluation: Mapping[str, Any]) -> None:
        await self._append(_Draft(lambda: evaluated(version, evaluation)))

    async def trained(self, version: int, groups: Sequence[ScoredGroup], seconds: Seconds = NO_SECONDS) -> None:
        group_ids = [group.summary.group_id for group in groups]
        references = [group.reference_logprobs for group in groups]
        what = "reference log-probs for the journal"
        made = partial(trained, version, group_ids, seconds=seconds)
        await self._append(_Draft(lambda *logprobs: made(logprobs), references, what))

    async def resumed(self, version: int, group_ids: Sequence[str]) -> None:
        await self._append(_Draft(lambda: resumed(version, group_ids)))

    async def forget(self, version: int) -> None:
        await self._on_thread(self.journal.forget, version)

    async def read(self, group_ids: Sequence[str]) -> dict[str, RecordedGroup]:
        return await self._on_thread(self.journal.read, group_ids)

    async def close(self) -> None:
        await self._on_thread(self.journal.close)
        self._thread.shutdown(wait=False)
        self._late.shutdown(wait=False)

    async def _append(self, draft: _Draft) -> None:
        if not await self._is_written(draft):
            record = await asyncio.wrap_future(self._late.submit(self._made_alone, draft))
            is_written = await self._is_written(_Draft(lambda: record))
            assert is_written, "a record that is made is written"

    async def _is_written(self, draft: _Draft) -> bool:
        """Writes a draft together with all waiting drafts. Returns False if its groups are not available now."""
        written: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((draft, written))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.ensure_future(self._write_waiting())
        return await written

    async def _write_waiting(self) -> None:
        while self._waiting:
            # Several groups in one write: an fsync costs the same for one group as for many.
            batch, self._waiting = self._waiting[:MAX_TOGETHER], self._waiting[MAX_TOGETHER:]
            try:
                are_written = await self._on_thread(self._write, [draft for draft, _ in batch])
            except Exception as error:
                for _, written in batch:
                    if not written.done():
                        written.set_exception(error)
            else:
                for (_, written), is_written in zip(batch, are_written, strict=True):
                    if not written.done():
                        written.set_result(is_written)

    def _write(self, drafts: Sequence[_Draft]) -> list[bool]:
        """Writes the drafts whose groups are available, on the writer's thread; returns whether each was written."""
        fetched = fetch_at_hand([draft.references for draft in drafts], wait_s=WAIT_S)
        made = [_made(draft, values) for draft, values in zip(drafts, fetched, strict=True)]
        self.journal.append([record for record in made if record is not None])
        return [record is not None for record in made]

    def _made_alone(self, draft: _Draft) -> JournalRecord:
        return draft.make(*fetch_or_miss(draft.references, timeout_s=self.timeout_s, what=draft.what))

    async def _on_thread(self, work: Callable[..., T], *args: Any) -> T:
        deadline = asyncio.timeout(self.write_s)
        try:
            async with deadline:
                # A hung disk blocks its thread; this deadline ends the run instead.
                return await asyncio.wrap_future(self._thread.submit(work, *args))
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise JournalError(
                f"waited {self.write_s:g} s for the journal below {self.journal.folder} (timeouts.object_s): see "
                "whether its disk answers, then go on with resume=auto, or set replay.journal=false"
            ) from error


def _made(draft: _Draft, values: Sequence[Any] | None) -> JournalRecord | None:
    """Returns None if the record cannot be built. The draft is then retried alone; only its caller gets the error."""
    if values is None:
        return None
    try:
        return draft.make(*values)
    except Exception:
        return None

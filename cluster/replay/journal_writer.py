"""The journal as the replay buffer writes it: from the driver's event loop, in order, one sync for all that wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from mobula.cluster.errors import JournalError
from mobula.cluster.records.arrow import RecordedGroup
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.cluster.replay import journal as records
from mobula.cluster.replay.journal import Journal
from mobula.cluster.replay.journal_segments import JournalRecord
from mobula.cluster.runtime.concurrency import DaemonThread
from mobula.cluster.runtime.object_store import fetch_at_hand, fetch_or_miss

T = TypeVar("T")
WAIT_S = 0.05  # with what is not there yet: all that is written together waits for it
MAX_TOGETHER = 32  # records, whose groups are in memory at one time
MAX_LATE = 8  # groups that are waited for at one time


class GroupJournal(Protocol):
    """Log of the buffer's groups; every call returns once its records are on disk."""

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


@dataclass(frozen=True)
class _Draft:
    """A record that `make` makes of the values of `references`."""

    make: Callable[..., JournalRecord]
    references: Sequence[Any] = ()
    what: str = ""  # they are


class JournalWriter:
    """Writes a `Journal` on a thread of its own, so that the event loop never waits for a disk.

    Records that come in while that thread is busy share one fetch and one sync afterwards (group commit). What is not
    there when they are fetched, as a group that went with its node, is waited for on other threads: it holds up nothing
    else. A disk that does not answer in time is an error, and does not keep the process from ending.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        timeout_s: float,
        write_s: float | None = None,
        start_thread: Callable[[], Executor] | None = None,
    ) -> None:
        """`timeout_s` bounds the fetch of one group, `write_s` each use of the disk (None: unbounded). `start_thread`
        gives an executor that runs one job at a time.
        """
        self._journal = journal
        self._timeout_s = timeout_s
        self._write_s = write_s
        self._thread = (start_thread or _start_thread)()
        self._late = ThreadPoolExecutor(MAX_LATE, thread_name_prefix="journal-late")
        self._waiting: list[tuple[_Draft, asyncio.Future[bool]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def finished(self, group: ScoredGroup) -> None:
        what = f"group {group.summary.group_id} for the journal"
        await self._append(_Draft(lambda fetched: records.finished(fetched, group.rewards), [group.group], what))

    async def rejected(self, group_id: str, reason: str) -> None:
        await self._append(_Draft(lambda: records.rejected(group_id, reason)))

    async def trained(self, version: int, groups: Sequence[ScoredGroup]) -> None:
        group_ids = [group.summary.group_id for group in groups]
        references = [group.reference_logprobs for group in groups]
        what = "reference log-probs for the journal"
        await self._append(_Draft(lambda *logprobs: records.trained(version, group_ids, logprobs), references, what))

    async def resumed(self, version: int, group_ids: Sequence[str]) -> None:
        await self._append(_Draft(lambda: records.resumed(version, group_ids)))

    async def forget(self, version: int) -> None:
        await self._on_thread(self._journal.forget, version)

    async def read(self, group_ids: Sequence[str]) -> dict[str, RecordedGroup]:
        return await self._on_thread(self._journal.read, group_ids)

    async def close(self) -> None:
        await self._on_thread(self._journal.close)
        self._thread.shutdown(wait=False)
        self._late.shutdown(wait=False)

    async def _append(self, draft: _Draft) -> None:
        if not await self._is_written(draft):
            record = await asyncio.wrap_future(self._late.submit(self._made_alone, draft))
            is_written = await self._is_written(_Draft(lambda: record))
            assert is_written, "a record that is made is written"

    async def _is_written(self, draft: _Draft) -> bool:
        """Have it written with all that wait; False once it turns out that it cannot be made at once."""
        written: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((draft, written))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.ensure_future(self._write_waiting())
        return await written

    async def _write_waiting(self) -> None:
        """Until no call waits: write what has come in by now, and answer the calls that still wait."""
        while self._waiting:
            # Several groups in one write: the fsync costs the same for one and for many.
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
        """Runs on the writer's thread: writes the drafts whose groups are at hand, and returns which were written."""
        fetched = fetch_at_hand([draft.references for draft in drafts], wait_s=WAIT_S)
        made = [_made(draft, values) for draft, values in zip(drafts, fetched, strict=True)]
        self._journal.append([record for record in made if record is not None])
        return [record is not None for record in made]

    def _made_alone(self, draft: _Draft) -> JournalRecord:
        return draft.make(*fetch_or_miss(draft.references, timeout_s=self._timeout_s, what=draft.what))

    async def _on_thread(self, work: Callable[..., T], *args: Any) -> T:
        deadline = asyncio.timeout(self._write_s)
        try:
            async with deadline:
                # A disk that hangs keeps its thread; the run ends by this deadline instead.
                return await asyncio.wrap_future(self._thread.submit(work, *args))
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise JournalError(
                f"waited {self._write_s:g} s for the journal below {self._journal.folder} (timeouts.object_s): see "
                "whether its disk answers, then go on with resume=auto, or set replay.journal=false"
            ) from error


def _made(draft: _Draft, values: Sequence[Any] | None) -> JournalRecord | None:
    """None if it cannot be made: alone it is tried again, and only its own caller gets the error."""
    if values is None:
        return None
    try:
        return draft.make(*values)
    except Exception:
        return None


def _start_thread() -> Executor:
    return DaemonThread("journal")

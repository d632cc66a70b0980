"""Writing a journal from an event loop: in order, together, off the loop, and never half written."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import make_scored
from waiting import until

from mobula.cluster.errors import JournalError, LostObjectError
from mobula.cluster.records.trajectory import GroupOutcome, ScoredGroup, TrajectoryGroup
from mobula.cluster.replay.journal import Journal, JournalRecord
from mobula.cluster.replay.journal_writer import MAX_TOGETHER, JournalWriter


class SlowJournal(Journal):
    """Appends only when it is let go on."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, {})
        self.batches: list[list[str]] = []
        self.asked = threading.Event()
        self.go_on = threading.Event()

    def append(self, records: list[JournalRecord]) -> None:
        self.asked.set()
        assert self.go_on.wait(30)
        self.batches.append([record.body["group_id"] for record in records])
        super().append(records)


class Store:
    """Where groups are, by name; who asks for one that is lost waits until `tell`."""

    def __init__(self) -> None:
        self.lost: set[str] = set()
        self.tell = threading.Event()
        self.fetched_together: list[list[str]] = []
        self.fetched_alone: list[str] = []
        self._groups: dict[str, TrajectoryGroup] = {}

    def put(self, group_id: str, *, is_lost: bool = False) -> ScoredGroup:
        group = make_scored(group_id)
        self._groups[group_id] = group.group
        self.lost |= {group_id} if is_lost else set()
        return replace(group, group=group_id)

    def fetch_at_hand(self, wanted: Sequence[Sequence[Any]], *, wait_s: float) -> list[list[Any] | None]:
        asked = [name for names in wanted for name in names if name]
        if asked:
            self.fetched_together.append(asked)
        return [None if self.lost.intersection(names) else [self._groups.get(n) for n in names] for names in wanted]

    def fetch_or_miss(self, references: Sequence[Any], *, timeout_s: float, what: str) -> list[Any]:
        self.fetched_alone += references
        assert self.tell.wait(30)
        if self.lost.intersection(references):
            raise LostObjectError(what)
        return [self._groups[name] for name in references]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    store = Store()
    monkeypatch.setattr("mobula.cluster.replay.journal_writer.fetch_at_hand", store.fetch_at_hand)
    monkeypatch.setattr("mobula.cluster.replay.journal_writer.fetch_or_miss", store.fetch_or_miss)
    yield store
    store.tell.set()  # no thread stays behind


def finished_in(folder: Path) -> list[str]:
    return [group.group_id for group in Journal(folder, {}).recover(0).finished]


async def test_records_that_wait_for_the_disk_are_written_together_and_the_loop_goes_on(tmp_path: Path) -> None:
    journal = SlowJournal(tmp_path)
    writer = JournalWriter(journal, timeout_s=5)
    groups = [make_scored(f"0/{n}/s") for n in range(20)]
    first = asyncio.ensure_future(writer.finished(groups[0]))
    await until(journal.asked.is_set)
    others = [asyncio.ensure_future(writer.finished(group)) for group in groups[1:]]
    await until(lambda: len(writer._waiting) == 19)
    assert not first.done(), "no call returns before its record is on disk"
    journal.go_on.set()
    await asyncio.gather(first, *others)
    assert [len(batch) for batch in journal.batches] == [1, 19]
    assert len(journal.recover(0).finished) == 20
    await writer.close()


async def test_records_are_on_disk_in_the_order_of_the_calls(tmp_path: Path) -> None:
    writer = JournalWriter(Journal(tmp_path, {}), timeout_s=5)
    for n in range(4):
        await writer.finished(make_scored(f"0/{n}/s"))
        await writer.rejected(GroupOutcome(f"1/{n}/s"), "uniform")
    await writer.trained(1, [make_scored("0/2/s"), make_scored("0/0/s")])
    found = Journal(tmp_path, {}).recover(0)
    assert found.steps[0].group_ids == ("0/2/s", "0/0/s")
    assert [g.group_id for g in found.finished] == ["0/1/s", "0/3/s"]
    assert found.rejected == ("1/0/s", "1/1/s", "1/2/s", "1/3/s")
    await writer.close()


async def test_a_disk_that_fails_raises_for_every_call_whose_record_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = SlowJournal(tmp_path)
    writer = JournalWriter(journal, timeout_s=5)
    calls = [asyncio.ensure_future(writer.rejected(GroupOutcome(f"0/{n}/s"), "stale")) for n in range(5)]
    await until(journal.asked.is_set)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    journal.go_on.set()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {JournalError}


async def test_groups_that_finish_together_are_fetched_together_and_synced_once(tmp_path: Path, store: Store) -> None:
    journal = SlowJournal(tmp_path)
    journal.go_on.set()
    writer = JournalWriter(journal, timeout_s=5)
    ids = [f"0/{n}/s" for n in range(8)]
    await asyncio.gather(*(writer.finished(store.put(group_id)) for group_id in ids))
    assert (store.fetched_together, store.fetched_alone, journal.batches) == ([ids], [], [ids])
    assert finished_in(tmp_path) == ids


async def test_no_more_groups_are_in_memory_together_than_may_be(tmp_path: Path, store: Store) -> None:
    writer = JournalWriter(Journal(tmp_path, {}), timeout_s=5)
    ids = [f"0/{n}/s" for n in range(2 * MAX_TOGETHER + 1)]
    await asyncio.gather(*(writer.finished(store.put(group_id)) for group_id in ids))
    assert [len(fetched) for fetched in store.fetched_together] == [MAX_TOGETHER, MAX_TOGETHER, 1]
    assert finished_in(tmp_path) == ids


async def test_a_lost_group_neither_delays_nor_fails_those_beside_it(tmp_path: Path, store: Store) -> None:
    writer = JournalWriter(Journal(tmp_path, {}), timeout_s=5)
    groups = [store.put(f"0/{n}/s", is_lost=n == 1) for n in range(4)]
    calls = [asyncio.ensure_future(writer.finished(group)) for group in groups]
    here = [call for call in calls if call is not calls[1]]
    await asyncio.gather(*here, writer.rejected(GroupOutcome("1/0/s"), "uniform"))
    await writer.trained(1, [make_scored("0/0/s"), make_scored("0/3/s")])
    assert not calls[1].done(), "it is still waited for"
    store.tell.set()
    with pytest.raises(LostObjectError, match="group 0/1/s for the journal"):
        await calls[1]
    assert store.fetched_alone == ["0/1/s"]
    assert finished_in(tmp_path) == ["0/2/s"]


async def test_a_group_that_comes_late_is_written_after_all(tmp_path: Path, store: Store) -> None:
    writer = JournalWriter(Journal(tmp_path, {}), timeout_s=5)
    late = asyncio.ensure_future(writer.finished(store.put("0/0/s", is_lost=True)))
    await writer.finished(store.put("0/1/s"))
    await until(lambda: store.fetched_alone)
    store.lost.clear()
    store.tell.set()
    await late
    assert finished_in(tmp_path) == ["0/1/s", "0/0/s"]


async def test_a_group_of_which_no_record_can_be_made_fails_its_own_call_alone(tmp_path: Path) -> None:
    writer = JournalWriter(Journal(tmp_path, {}), timeout_s=5)
    odd = replace(make_scored("0/0/s"), rewards=())
    calls = (
        writer.finished(odd),
        writer.finished(make_scored("0/1/s")),
        writer.rejected(GroupOutcome("0/2/s"), "stale"),
    )
    failed, *kept = await asyncio.gather(*calls, return_exceptions=True)
    assert (type(failed), kept) == (ValueError, [None, None])
    assert finished_in(tmp_path) == ["0/1/s"]


async def test_a_caller_that_gave_up_disturbs_no_other(tmp_path: Path) -> None:
    journal = SlowJournal(tmp_path)
    writer = JournalWriter(journal, timeout_s=5)
    first = asyncio.ensure_future(writer.rejected(GroupOutcome("0/0/s"), "stale"))
    await until(journal.asked.is_set)
    second, third = (asyncio.ensure_future(writer.rejected(GroupOutcome(f"0/{n}/s"), "stale")) for n in (1, 2))
    await until(lambda: len(writer._waiting) == 2)
    first.cancel()  # it is being written
    second.cancel()  # it waits
    journal.go_on.set()
    await third
    assert first.cancelled() and second.cancelled()
    assert journal.recover(0).rejected == ("0/0/s", "0/1/s", "0/2/s"), "what was handed over is written"
    await writer.rejected(GroupOutcome("0/3/s"), "stale")


async def test_a_caller_that_gave_up_on_a_lost_group_disturbs_no_other(tmp_path: Path, store: Store) -> None:
    writer = JournalWriter(Journal(tmp_path, {}), timeout_s=5)
    impatient = asyncio.ensure_future(writer.finished(store.put("0/0/s", is_lost=True)))
    await until(lambda: store.fetched_alone)
    impatient.cancel()
    await writer.finished(store.put("0/1/s"))
    store.tell.set()
    await writer.finished(store.put("0/2/s"))
    assert impatient.cancelled()
    assert finished_in(tmp_path) == ["0/1/s", "0/2/s"]


async def test_a_disk_that_does_not_answer_is_named_at_the_deadline(tmp_path: Path) -> None:
    journal = SlowJournal(tmp_path)
    writer = JournalWriter(journal, timeout_s=5, write_s=0.05)
    for call in (writer.rejected(GroupOutcome("0/0/s"), "stale"), writer.read(["0/0/s"]), writer.forget(1)):
        with pytest.raises(JournalError, match=rf"waited 0\.05 s for the journal below {tmp_path} .*object_s"):
            await call
    journal.go_on.set()

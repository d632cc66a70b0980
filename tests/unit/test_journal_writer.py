"""Writing a journal from an event loop: in order, together, off the loop, and never half told."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
from pathlib import Path

import pytest
from fakes import make_scored

from cluster.errors import DeadlineError, JournalError
from cluster.journal import Journal
from cluster.journal_segments import Record
from cluster.journal_writer import JournalWriter


class SlowJournal(Journal):
    """Appends only when it is let go on."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, {})
        self.batches: list[list[str]] = []
        self.go_on = threading.Event()

    def append(self, records: list[Record]) -> None:
        assert self.go_on.wait(30)
        self.batches.append([record.body["group_id"] for record in records])
        super().append(records)


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


async def test_records_that_wait_for_the_disk_are_written_together_and_the_loop_goes_on(tmp_path: Path) -> None:
    journal = SlowJournal(tmp_path)
    writer = JournalWriter(journal, timeout_s=5)
    groups = [make_scored(f"0/{n}/s") for n in range(20)]
    first = asyncio.ensure_future(writer.finished(groups[0]))
    await until(lambda: not writer._waiting and writer._executor is not None)
    others = [asyncio.ensure_future(writer.finished(group)) for group in groups[1:]]
    await until(lambda: len(writer._waiting) == 19)
    assert not first.done(), "nothing is told before it is on disk"
    journal.go_on.set()
    await asyncio.gather(first, *others)
    assert [len(batch) for batch in journal.batches] == [1, 19]
    assert len(journal.recover(0).finished) == 20
    await writer.close()


async def test_what_was_told_to_be_written_is_on_disk_in_the_order_of_the_calls(tmp_path: Path) -> None:
    writer = JournalWriter(Journal(tmp_path, {}), timeout_s=5)
    for n in range(4):
        await writer.finished(make_scored(f"0/{n}/s"))
        await writer.rejected(f"1/{n}/s", "uniform")
    await writer.trained(1, [make_scored("0/2/s"), make_scored("0/0/s")])
    found = Journal(tmp_path, {}).recover(0)
    assert found.steps[0].group_ids == ("0/2/s", "0/0/s")
    assert [g.group_id for g in found.finished] == ["0/1/s", "0/3/s"]
    assert found.rejected == ("1/0/s", "1/1/s", "1/2/s", "1/3/s")
    await writer.close()


async def test_a_disk_that_fails_is_told_to_everybody_whose_record_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = SlowJournal(tmp_path)
    writer = JournalWriter(journal, timeout_s=5)
    calls = [asyncio.ensure_future(writer.rejected(f"0/{n}/s", "stale")) for n in range(5)]
    await until(lambda: writer._executor is not None)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    journal.go_on.set()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {JournalError}


async def test_a_group_that_cannot_be_had_fails_its_own_call_alone(tmp_path: Path, monkeypatch) -> None:
    def fetch(references: list, *, timeout_s: float, what: str) -> list:
        if "0/0/s" in what:
            raise DeadlineError(f"waited {timeout_s} s for {what}")
        return references

    monkeypatch.setattr("cluster.journal_writer.fetch_or_miss", fetch)
    writer = JournalWriter(Journal(tmp_path, {}), timeout_s=5)
    lost, kept = await asyncio.gather(
        writer.finished(make_scored("0/0/s")), writer.finished(make_scored("0/1/s")), return_exceptions=True
    )
    assert (type(lost), kept) == (DeadlineError, None)
    assert [g.group_id for g in Journal(tmp_path, {}).recover(0).finished] == ["0/1/s"]


async def test_a_caller_that_gave_up_disturbs_nobody(tmp_path: Path) -> None:
    journal = SlowJournal(tmp_path)
    writer = JournalWriter(journal, timeout_s=5)
    impatient = asyncio.ensure_future(writer.rejected("0/0/s", "stale"))
    await until(lambda: writer._executor is not None)
    patient = asyncio.ensure_future(writer.rejected("0/1/s", "stale"))
    await until(lambda: len(writer._waiting) == 1)
    impatient.cancel()
    journal.go_on.set()
    await patient
    assert journal.recover(0).rejected == ("0/0/s", "0/1/s")


def test_it_travels_to_another_process_before_it_is_used(tmp_path: Path) -> None:
    writer = pickle.loads(pickle.dumps(JournalWriter(Journal(tmp_path / "journal", {}), timeout_s=5)))
    assert not (tmp_path / "journal").exists()
    asyncio.run(writer.rejected("0/0/s", "stale"))
    assert Journal(tmp_path / "journal", {}).recover(0).rejected == ("0/0/s",)

"""The journal and its writer."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from fakes import full_disk, make_group, make_prompt, make_scored
from group_data import assert_equal, image_prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import until

from mobula.cluster.errors import JournalError, LostObjectError
from mobula.cluster.records.trajectory import GroupOutcome, Reward, ScoredGroup, TrajectoryGroup
from mobula.cluster.replay import journal as records
from mobula.cluster.replay.journal import (
    Journal,
    JournalRecord,
    Recovered,
    finished,
    journal_identity,
    read_segment,
    resumed,
    segment_numbers,
    segment_path,
    trained,
)
from mobula.cluster.replay.journal_writer import MAX_TOGETHER, JournalWriter
from mobula.configs.load import load_config

IDENTITY = {"seed": 0, "policy.freeze": ["visual."], "algorithm": {"kl": {"coef": 0.1}}}

REWARDS = (Reward(0.75, {"accuracy": 1.0}, {"accuracy": "7 = 7"}), None)


def rejected(group_id: str, reason: str) -> JournalRecord:
    return records.rejected(GroupOutcome(group_id), reason)


def journal(folder: Path, *, segment_bytes: int = 2**20, **identity: object) -> Journal:
    return Journal(folder, {**IDENTITY, **identity}, segment_bytes=segment_bytes)


def done(group_id: str) -> JournalRecord:
    return finished(make_group(make_prompt(group_id)), REWARDS)


def step(version: int, *group_ids: str) -> JournalRecord:
    return trained(version, group_ids, [None] * len(group_ids))


def write(folder: Path, *records: JournalRecord, **options: object) -> None:
    written = journal(folder, **options)
    written.append(records)
    written.close()


def recover(folder: Path, version: int = 0, **options: object) -> Recovered:
    return journal(folder, **options).recover(version)


def steps(found: Recovered) -> list[tuple[int, ...]]:
    return [(s.version, *s.group_ids) for s in found.steps]


def waiting(found: Recovered) -> list[str]:
    return [group.group_id for group in found.finished]


def test_a_new_run_has_nothing_to_recover(tmp_path: Path) -> None:
    assert recover(tmp_path / "none", 7) == Recovered(7)


def test_a_trained_step_comes_back_with_its_groups_in_order_and_their_reference_logprobs(tmp_path: Path) -> None:
    group, other = make_group(image_prompt(), versions=(3, 3, 4, 5)), make_group(make_prompt("0/4/s4"))
    logprobs = [[t.behavior_logprobs - n for n, t in enumerate(g.trajectories)] for g in (other, group)]
    groups = [finished(group, REWARDS), finished(other, REWARDS)]
    write(tmp_path, *groups, trained(6, [other.group_id, group.group_id], logprobs))
    [found] = recover(tmp_path, 5).steps
    assert found.version == 6
    first, second = found.read()
    assert_equal(first.group, other)
    assert_equal(second.group, group)
    assert second.rewards == REWARDS
    np.testing.assert_array_equal(second.reference_logprobs, logprobs[1])
    assert second.group.prompt.media[0].reference is None, "images are not written"


def test_steps_are_taken_again_only_as_far_as_there_is_no_gap(tmp_path: Path) -> None:
    write(tmp_path, done("a/0/s"), done("b/0/s"), done("c/0/s"), step(1, "a/0/s"), step(3, "c/0/s"))
    found = recover(tmp_path, 0)
    assert (steps(found), waiting(found)) == ([(1, "a/0/s")], ["b/0/s", "c/0/s"])
    assert (steps(recover(tmp_path, 1)), waiting(recover(tmp_path, 1))) == ([], ["b/0/s", "c/0/s"])


def test_what_came_after_the_version_that_a_run_went_on_from_is_void(tmp_path: Path) -> None:
    write(tmp_path, done("a/0/s"), done("b/0/s"), done("c/0/s"), step(1, "a/0/s"), step(2, "b/0/s"))
    write(tmp_path, resumed(1, ["c/0/s"]), done("d/0/s"))
    found = recover(tmp_path, 0)
    assert (steps(found), waiting(found)) == ([(1, "a/0/s")], ["c/0/s", "d/0/s"])


def test_a_group_that_is_held_is_not_written_twice_but_one_that_was_given_up_is(tmp_path: Path) -> None:
    write(tmp_path, done("a/0/s"), done("b/0/s"))
    again = journal(tmp_path)
    again.append([resumed(0, ["a/0/s"])])
    before = segment_path(tmp_path, 1).stat().st_size
    again.append([done("a/0/s")])
    assert segment_path(tmp_path, 1).stat().st_size == before
    again.append([done("b/0/s")])
    assert waiting(recover(tmp_path)) == ["a/0/s", "b/0/s"]


def test_a_journal_of_other_settings_is_left_out_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, done("a/0/s"), step(1, "a/0/s"), done("b/0/s"))
    assert recover(tmp_path, seed=1) == Recovered(0)
    assert "written with another seed" in caplog.text
    write(tmp_path, resumed(0, []), done("c/0/s"), seed=1)
    assert recover(tmp_path) == Recovered(0), "the run went on with the other settings: this past did not come to be"
    assert waiting(recover(tmp_path, seed=1)) == ["c/0/s"]


def test_what_changes_the_speed_alone_does_not_change_the_identity() -> None:
    def identity(*words: str) -> object:
        return journal_identity(load_config(["experiment=digits", *words]))

    same = ["learner.tokens_per_microbatch=64", "sampler.vllm.kv_cache_bytes=999999", "resources.rollout.num_workers=1"]
    assert identity(*same) == identity()
    for other in ("learner.learning_rate=0.5", "algorithm.kl.coef=0.5", "sampler.temperature=0.5", "num_steps=7"):
        assert identity(other) != identity()


def record_of_everything() -> list[JournalRecord]:
    logprobs = [np.full(3, -0.25, dtype=np.float32)] * 2
    return [
        resumed(0, []),
        done("0/0/s0"),
        rejected("0/1/s1", "uniform"),
        trained(1, ["0/0/s0"], [logprobs]),
        finished(make_group(image_prompt()), REWARDS),
    ]


def seen(folder: Path) -> list[str]:
    found = [record for number in segment_numbers(folder) for record in read_segment(folder, number).records]
    return [f"{record.kind} {record.body} {record.rows.to_pylist()}" for record in found]


def test_wherever_a_segment_is_cut_every_whole_record_before_the_cut_is_kept(tmp_path: Path) -> None:
    written, ends = journal(tmp_path), []
    for record in record_of_everything():
        written.append([record])
        ends.append(segment_path(tmp_path, 0).stat().st_size)
    whole = seen(tmp_path)
    assert len(whole) == len(ends) == 5
    for cut in range(ends[-1], -1, -1):
        os.truncate(segment_path(tmp_path, 0), cut)
        found = read_segment(tmp_path, 0)
        num_whole = sum(end <= cut for end in ends)
        assert len(found.records) == num_whole, cut
        if num_whole:
            assert found.num_torn_bytes == cut - ends[num_whole - 1]
        if cut in ends:
            assert seen(tmp_path) == whole[:num_whole]


@settings(max_examples=300)
@given(place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_a_byte_that_changed_is_never_read_as_something_else(
    tmp_path_factory: pytest.TempPathFactory, place: float, flip: int
) -> None:
    folder = tmp_path_factory.mktemp("flipped")
    write(folder, *record_of_everything())
    whole = seen(folder)
    content = bytearray(segment_path(folder, 0).read_bytes())
    content[int(place * len(content))] ^= flip
    segment_path(folder, 0).write_bytes(content)
    found = seen(folder)
    assert found == whole[: len(found)]


def test_a_torn_end_is_counted_until_the_run_has_gone_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, done("a/0/s"), done("b/0/s"))
    path = segment_path(tmp_path, 0)
    path.write_bytes(path.read_bytes()[:-100])
    found = recover(tmp_path)
    assert (found.num_torn, waiting(found)) == (1, ["a/0/s"])
    assert "000000.arrows: its last" in caplog.text
    write(tmp_path, resumed(0, ["a/0/s"]))
    assert recover(tmp_path).num_torn == 0


def test_an_empty_file_of_a_killed_start_is_no_obstacle(tmp_path: Path) -> None:
    segment_path(tmp_path, 0).touch()
    write(tmp_path, done("a/0/s"))
    assert segment_numbers(tmp_path) == [0, 1]
    assert (waiting(recover(tmp_path)), recover(tmp_path).num_torn) == (["a/0/s"], 0)


def test_a_disk_that_takes_half_of_it_is_named_and_costs_nothing_that_was_written(tmp_path: Path) -> None:
    written = journal(tmp_path)
    written.append([done("a/0/s")])
    size = segment_path(tmp_path, 0).stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 1000, hard))  # no file may be longer
    try:
        with pytest.raises(JournalError, match=r"File too large.*resume=auto"):
            written.append([done(f"b/{n}/s") for n in range(200)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert waiting(recover(tmp_path)) == ["a/0/s"]
    written.append([done("c/0/s")])
    assert waiting(recover(tmp_path)) == ["a/0/s", "c/0/s"], "nothing follows what is half there"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match=r"file/journal cannot be written.*replay\.journal=false"):
        journal(tmp_path / "file" / "journal").append([done("a/0/s")])


def test_any_arrow_reader_can_look_into_a_segment(tmp_path: Path) -> None:
    write(tmp_path, done("0/0/s0"))
    with pa.memory_map(str(segment_path(tmp_path, 0))) as file:
        table = pa.ipc.open_stream(file).read_all()
    assert table["trajectory_id"].to_pylist() == ["0/0/s0#0", "0/0/s0#1"]


class Model:
    """What a journal of ever more segments should hold, kept in memory."""

    def __init__(self) -> None:
        self.finished: list[str] = []
        self.trained: list[list[str]] = []
        self.rejected: list[str] = []

    def untrained(self) -> list[str]:
        used = {group_id for ids in self.trained for group_id in ids}
        return [group_id for group_id in self.finished if group_id not in used]


def take_part(choose: random.Random, model: Model, number: int) -> JournalRecord:
    """Any record that a run may write next."""
    free = model.untrained()
    if free and choose.random() < 0.4:
        group_ids = choose.sample(free, choose.randint(1, min(2, len(free))))
        model.trained.append(group_ids)
        return step(len(model.trained), *group_ids)
    if choose.random() < 0.2:
        model.rejected.append(f"{number}/0/s")
        return rejected(f"{number}/0/s", "uniform")
    model.finished.append(f"{number}/0/s")
    return done(f"{number}/0/s")


def assert_the_oldest_segment_is_needed(folder: Path, checkpoint: int, model: Model) -> None:
    oldest, *later = [read_segment(folder, number) for number in segment_numbers(folder)]
    bodies = [record.body for record in oldest.records]
    is_mark = any(body.get("version") == checkpoint for body in bodies)
    assert not later or is_mark or any(body.get("group_id") in model.untrained() for body in bodies)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), segment_bytes=st.sampled_from([1, 6_000, 30_000]))
def test_forgetting_what_checkpoints_hold_loses_nothing_else_and_keeps_the_disk_small(
    tmp_path_factory: pytest.TempPathFactory, seed: int, segment_bytes: int
) -> None:
    choose, model = random.Random(seed), Model()
    folder = tmp_path_factory.mktemp("forgotten")
    written = journal(folder, segment_bytes=segment_bytes)
    num_rejected_at_checkpoint = checkpoint = 0
    for number in range(40):
        written.append([take_part(choose, model, number)])
        if model.trained and choose.random() < 0.2:
            checkpoint, num_rejected_at_checkpoint = len(model.trained), len(model.rejected)
            written.forget(checkpoint)
            assert_the_oldest_segment_is_needed(folder, checkpoint, model)
        found = recover(folder, checkpoint)
        assert steps(found) == [(v, *ids) for v, ids in enumerate(model.trained[checkpoint:], start=checkpoint + 1)]
        assert waiting(found) == model.untrained()
        assert set(found.rejected) >= set(model.rejected[num_rejected_at_checkpoint:])


def test_a_group_that_was_rejected_after_it_had_finished_does_not_wait_for_a_step(tmp_path: Path) -> None:
    write(tmp_path, done("0/0/s"), done("0/1/s"), rejected("0/0/s", "over_age"))
    found = recover(tmp_path)
    assert (waiting(found), found.rejected) == (["0/1/s"], ("0/0/s",))


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


async def test_a_failing_disk_raises_for_every_lost_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = SlowJournal(tmp_path)
    writer = JournalWriter(journal, timeout_s=5)
    calls = [asyncio.ensure_future(writer.rejected(GroupOutcome(f"0/{n}/s"), "stale")) for n in range(5)]
    await until(journal.asked.is_set)
    monkeypatch.setattr(os, "fsync", full_disk)
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
    odd, rejected = replace(make_scored("0/0/s"), rewards=()), writer.rejected(GroupOutcome("0/2/s"), "stale")
    calls = (writer.finished(odd), writer.finished(make_scored("0/1/s")), rejected)
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

"""What is written down around the learner, and how a run goes on from it: as configured, and off where it is off."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from fakes import FakeLearner, make_scored
from metrics_data import FakeClock, make_metrics

from mobula.cluster.metrics.definitions import CounterName
from mobula.cluster.recovery.recording_learner import RecordingLearner
from mobula.cluster.recovery.resume import JournalRecovery, NoRecovery
from mobula.cluster.replay.journal_writer import JournalWriter, NoJournal
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.deploy.wiring.persistence import (
    Records,
    build_journal_writer,
    build_records,
    reached_version,
    trajectory_log,
)


def config(folder: Path, *overrides: str) -> RunConfig:
    return load_config(["experiment=digits", f"folder={folder}", "name=job", *overrides])


def build(run: RunConfig, learner: FakeLearner) -> Records:
    nothing = SimpleNamespace()
    return build_records(run, learner, nothing, nothing, nothing, make_metrics([], FakeClock()))


async def test_the_journal_leads_from_a_checkpoint_to_the_last_step_that_was_written_down(tmp_path: Path) -> None:
    run = config(tmp_path)
    writer = build_journal_writer(run)
    assert isinstance(writer, JournalWriter)
    groups = [make_scored("0/0/s0"), make_scored("0/1/s1")]
    for version, group in enumerate(groups, start=6):
        await writer.finished(group)
        await writer.trained(version, [group])
    await writer.close()
    assert reached_version(run, 5) == 7
    assert reached_version(config(tmp_path, "replay.journal=false"), 5) == 5
    assert reached_version(config(tmp_path, "learner.learning_rate=0.5"), 5) == 5, "its updates would be others"


def test_a_run_without_a_journal_has_none_around_its_learner(tmp_path: Path) -> None:
    run, learner = config(tmp_path, "replay.journal=false"), FakeLearner()
    records = build(run, learner)
    assert records.learner is learner
    assert isinstance(records.recovery, NoRecovery)
    assert isinstance(build_journal_writer(run), NoJournal)


async def test_steps_are_logged_whether_the_loop_or_a_recovery_takes_them(tmp_path: Path) -> None:
    run, learner = config(tmp_path, "replay.trajectory_log=true"), FakeLearner()
    records = build(run, learner)
    assert isinstance(records.learner, RecordingLearner)
    assert isinstance(records.recovery, JournalRecovery)
    await records.recovery._learner.repeat([make_scored("0/0/s0")])
    (tmp_path / "state").mkdir()
    await records.learner.save(tmp_path / "state")
    assert trajectory_log(run.run_folder, run).steps() == [1]


def test_what_came_back_is_counted_by_kind(tmp_path: Path) -> None:
    metrics, nothing = make_metrics([], FakeClock()), SimpleNamespace()
    records = build_records(config(tmp_path), FakeLearner(), nothing, nothing, nothing, metrics)
    records.recovery._on_recovered({"steps": 2, "groups": 3, "stale": 1})
    assert metrics.counts(CounterName.RECOVERED) == {"steps": 2, "groups": 3, "stale": 1}

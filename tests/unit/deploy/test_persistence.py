"""What is written down around the learner, and how a run goes on from it: as configured, and off where it is off."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from fakes import FakeLearner, make_scored
from metrics_data import FakeClock, make_metrics

from mobula.cluster.metrics.definitions import CounterName
from mobula.cluster.metrics.hub import Metrics
from mobula.cluster.recovery.checkpoints import Recovery
from mobula.cluster.recovery.resume import JournalRecovery, NoRecovery
from mobula.cluster.recovery.step_learner import StepLearner
from mobula.cluster.replay.journal_writer import JournalWriter, NoJournal
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.deploy.wiring.persistence import (
    build_journal_writer,
    build_recovery,
    reached_version,
    step_learner,
    trajectory_log,
)


def config(folder: Path, *overrides: str) -> RunConfig:
    return load_config(["experiment=digits", f"folder={folder}", "name=job", *overrides])


def build(run: RunConfig, learner: FakeLearner, metrics: Metrics) -> tuple[StepLearner, Recovery]:
    nothing = SimpleNamespace()
    steps = step_learner(run, learner, nothing, metrics)
    return steps, build_recovery(run, steps, nothing, nothing, nothing, metrics)


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


async def test_a_run_without_a_journal_writes_none(tmp_path: Path) -> None:
    run, learner = config(tmp_path, "replay.journal=false"), FakeLearner()
    steps, recovery = build(run, learner, make_metrics([], FakeClock()))
    assert (await steps.update([make_scored("0/0/s0")])).version == 1
    assert isinstance(recovery, NoRecovery)
    assert isinstance(build_journal_writer(run), NoJournal)


async def test_steps_are_logged_whether_the_loop_or_a_recovery_takes_them(tmp_path: Path) -> None:
    run, learner = config(tmp_path, "replay.trajectory_log=true"), FakeLearner()
    steps, recovery = build(run, learner, make_metrics([], FakeClock()))
    assert isinstance(recovery, JournalRecovery)
    await recovery._learner.repeat([make_scored("0/0/s0")])
    (tmp_path / "state").mkdir()
    await steps.save(tmp_path / "state")
    assert trajectory_log(run.run_folder, run).steps() == [1]


def test_what_came_back_is_counted_by_kind(tmp_path: Path) -> None:
    metrics = make_metrics([], FakeClock())
    _, recovery = build(config(tmp_path), FakeLearner(), metrics)
    recovery._on_recovered({"steps": 2, "groups": 3, "stale": 1})
    assert metrics.counts(CounterName.RECOVERED) == {"steps": 2, "groups": 3, "stale": 1}

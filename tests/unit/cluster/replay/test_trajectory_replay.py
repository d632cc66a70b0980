"""A recorded run is trained again with the weights that it had, and its log is whole or names what is missing."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from fakes import FakeLearner, make_scored
from known_groups import KnownPrompts, OneRank, numbered
from learner_data import random_groups, tiny_config
from transformers import AutoTokenizer

from mobula.cluster.errors import ChangedDataError, PreflightError
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.cluster.recovery.step_learner import StepLearner
from mobula.cluster.replay.buffer import LiveGroups
from mobula.cluster.replay.trajectory_log import TrajectoryLog, train_again
from mobula.cluster.roles import UpdateReport
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl


def log_in(folder: Path) -> TrajectoryLog:
    return TrajectoryLog(folder / "trajectories", timeout_s=5)


def logged(
    learner: FakeLearner, log: TrajectoryLog, failures: list[str] | None = None, waiting: int = 2
) -> StepLearner:
    on_failed = (failures if failures is not None else []).append
    return StepLearner(learner, log=log, max_waiting=waiting, on_log_failed=on_failed)


def live(groups: Sequence[ScoredGroup]) -> LiveGroups:
    return LiveGroups(KnownPrompts(groups), put=lambda value: value)


class Saving(OneRank):
    async def save(self, folder: Path) -> None:
        self.rank.save(folder)
        self.rank.finish_save()

    async def load(self, folder: Path) -> int:
        return self.rank.load(folder)


async def test_replayed_weights_equal_the_runs_bit_for_bit(tmp_path: Path) -> None:
    model = write_tiny_qwen2_5_vl(tmp_path / "model", seed=0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    steps = [numbered(random_groups(tokenizer, 3, 4, seed), 3 * seed) for seed in range(3)]
    config = tiny_config(model, "algorithm.kl.coef=0.1", "resources.reference.num_workers=1")
    first = Saving(config)
    run = logged(first, log_in(tmp_path))
    for groups in steps:
        await run.update(groups)
    await run.save(tmp_path / "state")

    again, reports = OneRank(config), []
    every = [group for groups in steps for group in groups]
    assert await train_again(again, log_in(tmp_path), live(every), reports.append) == 3
    ours, theirs = again.weights(), first.weights()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert [report.version for report in reports] == [1, 2, 3]
    assert reports[0].metrics["kl"] > 0, "the reference log-probs came along"


async def test_a_log_with_a_gap_is_refused(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    with pytest.raises(PreflightError, match="no recorded step: run with replay.trajectory_log=true"):
        await train_again(FakeLearner(), log, live([]), print)
    for step in (1, 3, 4):
        log.append(step, [make_scored("0/0/s0")])
    with pytest.raises(PreflightError, match=r"lacks step 2 \(1 of 4 are missing\)"):
        await train_again(FakeLearner(), log, live([]), print)


async def test_other_data_are_not_trained_on_in_place_of_the_recorded_ones(tmp_path: Path) -> None:
    group = make_scored("0/0/s0")
    log_in(tmp_path).append(1, [group])
    prompt = dataclasses.replace(group.group.prompt, expanded_ids=group.group.prompt.expanded_ids + 1)
    other = dataclasses.replace(group, group=dataclasses.replace(group.group, prompt=prompt))
    with pytest.raises(ChangedDataError, match="other tokens"):
        await train_again(FakeLearner(), log_in(tmp_path), live([other]), print)


class SlowLog(TrajectoryLog):
    """Writes only when it is let go on."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, timeout_s=5)
        self.go_on = threading.Event()

    def append(self, step: int, groups: Sequence[ScoredGroup]) -> Path:
        assert self.go_on.wait(30)
        return super().append(step, groups)


async def test_updates_do_not_wait_for_the_log_until_too_many_steps_do(tmp_path: Path) -> None:
    log = SlowLog(tmp_path)
    learner = logged(FakeLearner(), log, waiting=2)
    for n in range(2):
        await asyncio.wait_for(learner.update([make_scored(f"0/{n}/s")]), 30)
    third = asyncio.ensure_future(learner.update([make_scored("0/2/s")]))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not third.done()
    log.go_on.set()
    await asyncio.wait_for(third, 30)
    (tmp_path / "state").mkdir()
    await learner.save(tmp_path / "state")
    assert log.steps() == [1, 2, 3], "a checkpoint has no step that the log has not"
    assert await learner.load(tmp_path / "state") == 3


async def test_a_log_that_fails_is_counted_and_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class FullDisk(TrajectoryLog):
        def append(self, step: int, groups: Sequence[ScoredGroup]) -> Path:
            if step == 1:
                raise OSError(28, "No space left on device")
            return super().append(step, groups)

    failures: list[str] = []
    log = FullDisk(tmp_path / "log", timeout_s=5)
    learner = logged(FakeLearner(), log, failures)
    for n in range(2):
        report: UpdateReport = await learner.update([make_scored(f"0/{n}/s")])
        assert report.version == n + 1
    (tmp_path / "state").mkdir()
    await learner.save(tmp_path / "state")
    assert (failures, log.steps()) == (["OSError"], [2])
    assert "step 1 is missing in the trajectory log" in caplog.text

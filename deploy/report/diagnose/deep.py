"""Runs the trials of `mobula diagnose --deep` with the learner of a run, without a rollout actor."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mobula.deploy.data.replay import VERSION_ZERO, learner_place  # isort: skip  (sets what ray reads when imported)
import ray

from mobula.cluster.errors import PreflightError, SkippedSample
from mobula.cluster.metrics.report.run_folder import RunFinding
from mobula.cluster.replay.buffer import LiveGroups
from mobula.cluster.replay.trajectory_log import TrajectoryLog
from mobula.cluster.runtime.object_store import fetch
from mobula.configs.schema import RunConfig
from mobula.deploy.host.run_folder import run_lock
from mobula.deploy.report.diagnose import trials
from mobula.deploy.report.diagnose.material import not_measured
from mobula.deploy.report.diagnose.trials import TrialGroup
from mobula.deploy.wiring.persistence import trajectory_log
from mobula.deploy.wiring.preparation import Prepared, prepare
from mobula.deploy.wiring.roles import learner_group, supervised_rows
from mobula.deploy.wiring.spawner import Spawner
from mobula.learner.learner_group import LearnerGroup

NAMES = (trials.MEMORISE_NAME, trials.PICTURES_NAME, trials.RATES_NAME)
NUM_GROUPS = 64  # of the first, and of the newest recorded steps


def run_trials(folder: Path | None, config: RunConfig) -> list[RunFinding]:
    """Returns the findings of the trials; a trial that this run cannot have is `not measured`."""
    reason = _missing(folder, config)
    if reason or folder is None:
        return [not_measured(name, reason) for name in NAMES]
    # Without a warm-up: a trial takes a few steps only.
    config = config.model_copy(update={"learner": config.learner.model_copy(update={"warmup_steps": 0})})
    with run_lock(folder):
        prepared = prepare(config, ray.put)
        assert isinstance(prepared, Prepared), "offline jobs keep no log"
        with learner_place(config) as spawner:
            return asyncio.run(Trials(folder, prepared, spawner).run())


def _missing(folder: Path | None, config: RunConfig) -> str:
    if folder is None:
        return "trials need the recorded groups of a run"
    if config.sampler.is_flow or config.sampler.draws_tokens or config.environment.is_on:
        return "trials score answers in text, without an environment"
    if not trajectory_log(folder, config).steps():
        return "the run has no recorded step: run with replay.trajectory_log=true"
    if not (folder / VERSION_ZERO).is_dir():
        return f"{folder / VERSION_ZERO} is missing"
    return ""


class Trials:
    """The trials of one run: each starts with the learner's state of version 0 or of the newest checkpoint."""

    def __init__(self, folder: Path, prepared: Prepared, spawner: Spawner) -> None:
        self._folder = folder
        self._prepared = prepared
        self._spawner = spawner
        self._log = trajectory_log(folder, prepared.config)
        self._live = LiveGroups(prepared.source(), ray.put)
        self._learner: LearnerGroup | None = None

    async def run(self) -> list[RunFinding]:
        steps = self._log.steps()
        first = await asyncio.to_thread(self._groups, steps)
        newest = await asyncio.to_thread(self._groups, steps[::-1])
        zero = self._folder / VERSION_ZERO / "learner"
        try:
            learner = await self._start(1.0)
            await learner.load(_newest(self._folder))
            found = [await trials.ablate_pictures(learner, newest)]
            await learner.load(zero)
            found.append(await trials.memorise(learner, first))
            found.append(await trials.scan(self._start, first, zero))
        finally:
            if self._learner is not None:
                await self._learner.close()
        return found

    async def _start(self, factor: float) -> LearnerGroup:
        """Starts a learner with the learning rate times `factor`; the one before it is closed."""
        if self._learner is not None:
            await self._learner.close()
        config = self._prepared.config
        rate = {"learning_rate": config.learner.learning_rate * factor}
        changed = config.model_copy(update={"learner": config.learner.model_copy(update=rate)})
        prepared = replace(self._prepared, config=changed)
        self._learner = learner_group(prepared, self._spawner, supervised_rows(prepared))
        try:
            await self._learner.start()
        except ValueError as error:  # the configuration does not fit the model
            raise PreflightError(str(error)) from error
        return self._learner

    def _groups(self, steps: Sequence[int]) -> list[TrialGroup]:
        return recorded_groups(self._log, self._live, steps, self._prepared.config.timeouts.object_s)


def recorded_groups(log: TrajectoryLog, live: LiveGroups, steps: Sequence[int], timeout_s: float) -> list[TrialGroup]:
    """Returns up to `NUM_GROUPS` groups of the steps, in their order; groups whose data have changed are left out."""
    found: list[TrialGroup] = []
    for step in steps:
        for recorded in log.read(step):
            if len(found) == NUM_GROUPS:
                return found
            try:
                scored = live.revive(recorded)
            except SkippedSample:
                continue
            [group] = fetch([scored.group], timeout_s=timeout_s, what="a recorded group")
            found.append(TrialGroup(scored, group.prompt, group.trajectories))
    return found


def _newest(folder: Path) -> Path:
    states = sorted((folder / VERSION_ZERO).parent.glob("step-*/learner"))
    return states[-1]

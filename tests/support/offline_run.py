"""An offline job without Ray: the real loop, data, learner, checkpoints and metrics in one process."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import partial
from pathlib import Path

from fakes import LocalHandle, stop_request
from rich.console import Console

from mobula.actors.reference.pool import NullReference
from mobula.actors.reference.scorer import ReferenceScorer
from mobula.cluster.metrics.hub import Metrics
from mobula.cluster.recovery.checkpoints import newest_learner_state
from mobula.cluster.recovery.lost_ranks import RestoredRanks
from mobula.cluster.roles import Reference
from mobula.cluster.rollout.row_stream import RowStream
from mobula.cluster.workers.status import RestartBudget
from mobula.configs.schema import RunConfig
from mobula.deploy.host.run_folder import CHECKPOINTS_FOLDER
from mobula.deploy.wiring.build import OfflineTraining, build_offline_controller
from mobula.deploy.wiring.persistence import RunContext, build_metrics
from mobula.deploy.wiring.preparation import prepare
from mobula.deploy.wiring.roles import reference_folder, restart_policy
from mobula.learner.learner import Learner
from mobula.learner.learner_group import LearnerGroup


class OneScorer:
    """`ReferencePool` with its only scorer in this process."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self._scorer = ReferenceScorer(config, ())
        self._folder = folder
        self._is_loaded = False
        self.num_scored = 0

    async def score(self, groups):
        if not self._is_loaded:
            self._scorer.load(self._folder)
            self._is_loaded = True
        self.num_scored += len(groups)
        found = self._scorer.score(groups)
        return [replace(group, reference_logprobs=logprobs) for group, logprobs in zip(groups, found, strict=True)]


class OfflineRun:
    """One process's part of a run; make another on the same folder to resume."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        config.run_folder.mkdir(parents=True, exist_ok=True)
        self.prepared = prepare(config, lambda value: value)
        self.learner = Learner(config, 0, 1, ())
        self.ranks = LearnerGroup(lambda: [LocalHandle(self.learner)], config.timeouts, lambda value: value)
        self.reference: Reference = (
            OneScorer(config, reference_folder(config)) if config.needs_reference else NullReference()
        )
        source = self.prepared.source()
        self.rows = RowStream(source, lambda value: value, self.reference, total_steps=config.num_steps)
        newest = partial(newest_learner_state, config.run_folder / CHECKPOINTS_FOLDER)
        budget = RestartBudget(restart_policy(config))
        self.ranks.lost_ranks = RestoredRanks(self.ranks, newest=newest, budget=budget, on_lost=lambda kind: None)
        self.stop = stop_request(deadline_s=60)
        self.training = OfflineTraining(self.ranks, self.reference, self.rows, ())

    async def go(self) -> Metrics:
        """Train to the end; returns what was measured."""
        await self.ranks.start()
        found = newest_learner_state(self.config.run_folder / CHECKPOINTS_FOLDER)
        metrics = build_metrics(self.config, Console(file=io.StringIO()), 0 if found is None else found[0])
        try:
            run = RunContext(self.config, metrics, self.stop)
            controller = build_offline_controller(self.prepared, self.training, run, lambda value: value)
            await controller.run()
        finally:
            metrics.close()
        return metrics

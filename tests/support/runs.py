"""A whole run of fakes around the real loop: controller, dispatcher, gate, buffer and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

from fakes import (
    SETTINGS,
    FakeEvaluator,
    FakeLearner,
    FakeMetrics,
    FakePrompts,
    FakeReference,
    FakeRewards,
    FakeRollouts,
    FakeWeights,
    NoSupervisor,
    stop_request,
)
from pooled_fakes import PooledRollouts

from mobula.cluster.audit.observer import AuditedRecovery, RunAudit
from mobula.cluster.controller import Controller
from mobula.cluster.records.trajectory import GroupOutcome
from mobula.cluster.recovery.checkpoints import CheckpointAlone, Checkpoints, CheckpointSchedule, Resumable
from mobula.cluster.recovery.resume import JournalRecovery
from mobula.cluster.recovery.step_learner import StepLearner
from mobula.cluster.replay.buffer import LiveGroups, ReplayBuffer
from mobula.cluster.replay.journal import Journal
from mobula.cluster.replay.journal_writer import JournalWriter
from mobula.cluster.roles import Rewards, Rollouts
from mobula.cluster.rollout.dispatcher import AdmissionFilter, GroupObserver, RetryingRollouts, RolloutDispatcher
from mobula.cluster.rollout.in_flight import InFlightRequests
from mobula.cluster.rollout.staleness import AgeLimit, StalenessGate, StepOrder
from mobula.cluster.tracing.tracer import UNTRACED, RunTracer
from mobula.configs.schema.run import Resume

NO_PARTS: Mapping[str, Resumable] = {}
SEGMENT_BYTES = 20_000  # a few groups, so that short runs have several segments


class AtOnce(Executor):
    """Runs each job when it is submitted: what a test sees does not depend on a thread's timing."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class _Rejections(GroupObserver):
    def __init__(self, found: list[tuple[GroupOutcome, str]]) -> None:
        self._found = found

    def rejected(self, outcome: GroupOutcome, reason: str) -> None:
        self._found.append((outcome, reason))


class Run:
    """One process's part of a run; make another on the same folder to resume.

    `rollouts` may take the place of the fakes that `pauses` and `fault` describe, and `rewards` of those of `values`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        total_steps: int,
        prompts_per_step: int = 2,
        max_staleness: int = 0,
        max_concurrent: int = 16,
        max_retries: int = 0,
        drop_uniform: bool = False,
        pauses: Callable[[str], int] = lambda prompt_id: 0,
        fault: Callable[[str, int], Exception | None] | None = None,
        values: Callable[[str], Sequence[float | None]] = lambda prompt_id: (0.0, 1.0),
        rollouts: Rollouts | None = None,
        rewards: Rewards | None = None,
        learner: FakeLearner | None = None,
        on_version: Callable[[int], None] = lambda version: None,
        checkpoint_interval: int = 1,
        resume: Resume = Resume.AUTO,
        has_journal: bool = False,
        max_bytes: float = math.inf,
        order: type[StepOrder] = StepOrder,
        drops_whole: bool = False,
        stop_s: float = 5.0,
        tracer: RunTracer = UNTRACED,
        audit: RunAudit | None = None,
        observers: Sequence[GroupObserver] = (),
        parts: Mapping[str, Resumable] = NO_PARTS,
        prompts: FakePrompts | None = None,
        prefetches: bool = True,
    ) -> None:
        self.prompts = prompts or FakePrompts(epoch_size=50)
        self.rollouts = rollouts or (FakeRollouts(pauses, fault) if fault else PooledRollouts(FakeRollouts(pauses)))
        self.weights = FakeWeights(self.rollouts)
        self.journal = Journal(folder / "journal", {"seed": 0}, segment_bytes=SEGMENT_BYTES)
        self.replay = ReplayBuffer(
            journal=JournalWriter(self.journal, timeout_s=5, start_thread=AtOnce) if has_journal else None,
            max_bytes=max_bytes,
            min_ready=prompts_per_step,
            tracer=tracer,
        )
        self.learner = learner or FakeLearner()
        self.evaluator = FakeEvaluator(on_version)
        self.metrics = FakeMetrics()
        self.stop = stop_request(stop_s)
        self._audit = audit or RunAudit()
        self.num_prepared = 0
        self.num_finished = 0
        self.recovered: dict[str, int] = {}
        self.rejected: list[tuple[GroupOutcome, str]] = []
        self.gate = StalenessGate(
            prompts_per_step=prompts_per_step,
            max_staleness=max_staleness,
            max_concurrent=max_concurrent,
            total_steps=total_steps,
        )
        self.dispatcher = RolloutDispatcher(
            prompts=self.prompts,
            gate=self.gate,
            rollouts=RetryingRollouts(
                self.rollouts, InFlightRequests(64), max_retries=max_retries, on_retry=lambda kind: None
            ),
            rewards=rewards or FakeRewards(values),
            replay=self.replay,
            settings=SETTINGS,
            admission_filter=AdmissionFilter(min_scored=2, drop_uniform=drop_uniform, max_rejected_in_a_row=1000),
            order=order(self.gate),
            age_limit=AgeLimit(max_staleness, is_whole=drops_whole),
            group_observers=[_Rejections(self.rejected), *observers],
            prefetches=prefetches,
            observer=self._audit,
            tracer=tracer,
        )
        self.weights.on_announced(self.dispatcher.advance)
        learner = StepLearner(self.learner, journal=self.replay if has_journal else None, tracer=tracer)
        recovery = JournalRecovery(
            self.journal,
            learner=learner,
            groups=LiveGroups(self.prompts, put=lambda value: value),
            dispatcher=self.dispatcher,
            replay=self.replay,
            metrics=self.metrics,
            age_limit=AgeLimit(max_staleness),
            on_recovered=self.recovered.update,
        )
        self.checkpoints = Checkpoints(
            folder / "checkpoints",
            learner=learner,
            parts={"rollouts": self.dispatcher, **parts},
            prepare=self._prepare,
            finish=self._finish,
            identity={"seed": 0},
            resume=resume,
            schedule=CheckpointSchedule(interval_steps=checkpoint_interval, total_steps=total_steps, keep=2),
            recovery=AuditedRecovery(recovery if has_journal else CheckpointAlone(), self._audit),
        )
        self.controller = Controller(
            total_steps=total_steps,
            groups_per_step=prompts_per_step,
            checkpoints=self.checkpoints,
            weights=self.weights,
            supervisor=NoSupervisor(),
            rollouts=self.dispatcher,
            replay=self.replay,
            reference=FakeReference(),
            learner=learner,
            evaluator=self.evaluator,
            metrics=self.metrics,
            stop=self.stop,
        )

    async def go(self) -> int:
        if isinstance(self.rollouts, PooledRollouts):
            return await self.rollouts.during(self.controller.run)
        return await self.controller.run()

    async def _prepare(self) -> None:
        self.num_prepared += 1

    async def _finish(self) -> None:
        self.num_finished += 1

"""A whole run of fakes around the real loop: controller, dispatcher, gate, buffer and checkpoints."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, TypeVar

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

from mobula.cluster.audit.chain import AUDIT_FILE, HEAD_FILE, ChainWriter, Head, SigningKey, encode
from mobula.cluster.audit.observer import AuditedRecovery, RunAudit
from mobula.cluster.audit.verification import Audit, verify
from mobula.cluster.controller import Controller
from mobula.cluster.metrics.report.run_folder import CONFIG_FILE, METRICS_FILE
from mobula.cluster.metrics.sinks.jsonl import JsonlSink
from mobula.cluster.metrics.step_records import StepRecord
from mobula.cluster.records.trajectory import Generated, GroupOutcome, Prompt, ScoredGroup
from mobula.cluster.recovery.checkpoints import Checkpoints, CheckpointSchedule, Recovery, Resumable
from mobula.cluster.recovery.resume import JournalRecovery
from mobula.cluster.recovery.step_learner import StepLearner
from mobula.cluster.replay.buffer import LiveGroups, ReplayBuffer
from mobula.cluster.replay.journal import Journal
from mobula.cluster.replay.journal_writer import GroupJournal, JournalWriter
from mobula.cluster.roles import Rewards, Rollouts, SamplingSettings, UpdateReport
from mobula.cluster.rollout.dispatcher import AdmissionFilter, GroupObserver, RetryingRollouts, RolloutDispatcher
from mobula.cluster.rollout.in_flight import InFlightRequests
from mobula.cluster.rollout.rollout_pool import HealthChecks, RolloutPool
from mobula.cluster.rollout.staleness import AgeLimit, StalenessGate, StepOrder
from mobula.cluster.tracing.tracer import UNTRACED, RunTracer
from mobula.cluster.weight_sync.weight_sync import Push
from mobula.cluster.workers.status import RestartPolicy
from mobula.configs.schema.run import Resume

T = TypeVar("T")

LONG_S = 1e9

NO_CHECKS = HealthChecks(interval_s=LONG_S, probe_interval_s=LONG_S, max_failures_in_a_row=1, no_worker_s=LONG_S)
NO_RESTART = RestartPolicy(max_restarts=0, window_s=LONG_S, backoff_s=0.0, max_backoff_s=0.0)


class FakeEngine:
    """Implements `mobula.cluster.rollout.rollout_pool.Engine`: samples as `source` does, which all engines share."""

    def __init__(self, name: str, source: FakeRollouts) -> None:
        self.name = name
        self._source = source

    async def start(self) -> None: ...

    async def generate(self, prompt: Prompt, settings: SamplingSettings) -> Generated:
        return await self._source.generate(prompt, settings)

    async def is_alive(self) -> None: ...

    async def probe(self) -> None: ...

    async def weight_version(self) -> int:
        return self._source.version

    async def close(self) -> None: ...


class PooledRollouts:
    """`RolloutPool` over such engines; to set `version` is a push that reaches all of them."""

    def __init__(self, source: FakeRollouts, num_engines: int = 2) -> None:
        self._source = source

        async def spawn(index: int) -> FakeEngine:
            return FakeEngine(f"rollout/{index}", source)

        self.pool = RolloutPool(
            spawn, num_engines, release=release, policy=NO_RESTART, health=NO_CHECKS, on_lost=_refuse_loss
        )

    @property
    def attempts(self) -> Counter[str]:
        """How often each prompt was sampled."""
        return self._source.attempts

    @property
    def num_in_flight(self) -> int:
        """Prompts that are being sampled."""
        return self._source.num_in_flight

    @property
    def version(self) -> int:
        return self._source.version

    @version.setter
    def version(self, version: int) -> None:
        self.pool.announced(version)
        self._source.version = version
        for engine in self.pool.receivers():
            self.pool.synced(engine, version)
        self.pool.published(version)

    async def generate(self, prompt: Prompt, settings: SamplingSettings) -> Generated:
        return await self.pool.generate(prompt, settings)

    async def during(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of `work()`, which runs while the pool serves."""
        await self.pool.start()
        async with self.pool.tended():
            result = await work()
        await self.pool.close()
        return result


async def release(index: int) -> None: ...


def _refuse_loss(kind: str) -> None:
    raise AssertionError(f"an engine that does not fail was lost: {kind}")


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
            journal=JournalWriter(self.journal, timeout_s=5, start_thread=AtOnce) if has_journal else GroupJournal(),
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
        self.weights.on_announced.append(self.dispatcher.advance)
        learner = StepLearner(self.learner, journal=self.replay if has_journal else None, tracer=tracer)
        recovery = JournalRecovery(
            self.journal, learner=learner, groups=LiveGroups(self.prompts, put=lambda value: value),
            dispatcher=self.dispatcher, replay=self.replay, metrics=self.metrics, age_limit=AgeLimit(max_staleness),
            on_recovered=self.recovered.update,
        )  # fmt: skip
        self.checkpoints = Checkpoints(
            folder / "checkpoints",
            learner=learner,
            parts={"rollouts": self.dispatcher, **parts},
            prepare=self._prepare,
            finish=self._finish,
            identity={"seed": 0},
            resume_mode=resume,
            schedule=CheckpointSchedule(interval_steps=checkpoint_interval, total_steps=total_steps, keep=2),
            recovery=AuditedRecovery(recovery if has_journal else Recovery(), self._audit),
        )
        self.controller = Controller(
            total_steps=total_steps, groups_per_step=prompts_per_step, checkpoints=self.checkpoints,
            weights=self.weights, supervisor=NoSupervisor(), rollouts=self.dispatcher, replay=self.replay,
            reference=FakeReference(), learner=learner, evaluator=self.evaluator, metrics=self.metrics, stop=self.stop,
        )  # fmt: skip

    async def go(self) -> int:
        if isinstance(self.rollouts, PooledRollouts):
            return await self.rollouts.during(self.controller.run)
        return await self.controller.run()

    async def _prepare(self) -> None:
        self.num_prepared += 1

    async def _finish(self) -> None:
        self.num_finished += 1


CONFIG = "seed: 0\n"  # of the run

PROVENANCE: dict[str, Any] = {
    "run": "audited",
    "config_sha256": hashlib.sha256(CONFIG.encode()).hexdigest(),
    "seed": 0,
    "code": {"version": "0", "commit": "", "sha256": ""},
    "packages": {},
    "machine": {},
    "data": {},
    "model": "",
}


class AuditedLearner(FakeLearner):
    """Reports each step and its metrics as the learner and the hub of a run do."""

    def __init__(self, audit: RunAudit, sinks: Sequence[Any]) -> None:
        super().__init__()
        self._audit = audit
        self._sinks = sinks

    async def update(self, groups: Sequence[ScoredGroup]) -> UpdateReport:
        report = await super().update(groups)
        self._audit.trained(report.version, groups)
        await self._audit.pushed(push_of(report.version))
        for sink in self._sinks:
            sink.emit(StepRecord(report.version, {"total": 1.0}, {"loss": 0.5}, {0: 4}, {}, {}))
        return report


def push_of(version: int) -> Push:
    how = {"rollout/0": "checksum+canary", "rollout/1": "checksum"}
    return Push(version, 8, 0.1, None, manifest_sha256="1" * 64, receivers=how)


def audited_run(
    folder: Path, *, max_staleness: int = 0, key: SigningKey | None = None, **settings: Any
) -> tuple[Run, RunAudit]:
    """One process's part of a run that writes an audit; it has recorded its start."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(CONFIG)
    audit = RunAudit(ChainWriter(folder, key=key), folder, folder / "checkpoints")
    metrics = JsonlSink(folder / METRICS_FILE, version=10**9)
    bounds = {"max_staleness": max_staleness, "stragglers": "wait", "num_steps": 9, "keep": 2}
    audit.started({**PROVENANCE, "bounds": bounds})
    asyncio.run(audit.pushed(push_of(0)))
    learner = AuditedLearner(audit, [audit, metrics])
    return Run(folder, learner=learner, max_staleness=max_staleness, has_journal=True, audit=audit, **settings), audit


def whole_run(folder: Path, num_steps: int = 4, key: SigningKey | None = None) -> Path:
    """A run from start to end, stopped and resumed after half of its steps."""
    for total in (num_steps // 2, num_steps):
        run, audit = audited_run(folder, total_steps=total, checkpoint_interval=2, key=key)
        asyncio.run(run.go())
        audit.ended("done", total)
    return folder


def rewrite_chain(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes a chain of these records that is consistent in itself, as a forger without a key can."""
    previous, content = "0" * 64, b""
    for seq, row in enumerate(rows):
        line, previous = encode(seq, previous, row["at_s"], row["kind"], row["body"])
        content += line
    (folder / AUDIT_FILE).write_bytes(content)
    (folder / HEAD_FILE).write_bytes(Head(len(rows), len(content), previous).encoded())


def audited(folder: Path, head: str = "", key: SigningKey | None = None) -> Audit:
    return verify(folder, head, key)

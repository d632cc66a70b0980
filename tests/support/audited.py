"""A run of fakes around the real loop that writes an audit, with metrics, pushes and checkpoints."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fakes import FakeLearner
from runs import Run

from mobula.cluster.audit.chain import SigningKey
from mobula.cluster.audit.observer import AuditSink, RunAudit
from mobula.cluster.audit.verification import Audit, verify
from mobula.cluster.audit.writer import ChainWriter
from mobula.cluster.metrics.report.run_folder import CONFIG_FILE, METRICS_FILE
from mobula.cluster.metrics.sinks.jsonl import JsonlSink
from mobula.cluster.metrics.step_records import StepRecord
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.cluster.roles import UpdateReport
from mobula.cluster.weight_sync.weight_sync import Push

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
    learner = AuditedLearner(audit, [AuditSink(audit), metrics])
    return Run(folder, learner=learner, max_staleness=max_staleness, has_journal=True, audit=audit, **settings), audit


def whole_run(folder: Path, num_steps: int = 4, key: SigningKey | None = None) -> Path:
    """A run from start to end, stopped and resumed after half of its steps."""
    for total in (num_steps // 2, num_steps):
        run, audit = audited_run(folder, total_steps=total, checkpoint_interval=2, key=key)
        asyncio.run(run.go())
        audit.ended("done", total)
    return folder


def audited(folder: Path, head: str = "", key: SigningKey | None = None) -> Audit:
    return verify(folder, head, key)

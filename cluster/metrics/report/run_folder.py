"""RunFolder: reads the files of a run for its report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mobula.cluster.metrics.guard_events import GUARD_FILE, GuardEvent, read_events
from mobula.cluster.metrics.report.findings import RunFinding, pictures_of, read_findings
from mobula.cluster.metrics.report.samples import SampleFile, read_samples
from mobula.cluster.metrics.sinks.jsonl import read_records
from mobula.cluster.metrics.step_records import HELD_OUT, EvaluationRecord, StepRecord
from mobula.cluster.metrics.summary import Summary, read_summary
from mobula.cluster.workers.faults import FAULTS_FILE, Fault, read_faults

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
SUMMARY_FILE = "summary.json"
PLAN_FILE = "plan.json"
SKIPPED_FILE = "skipped.json"
CONFIG_FILE = "config.yaml"
REPORT_FILE = "report.html"


@dataclass(frozen=True)
class RecordedPlanRow:
    """One worker of the role plan with its resources."""

    role: str
    index: int
    cpus: float
    gpus: float
    node: str
    cores: tuple[int, ...]


@dataclass(frozen=True)
class SkippedRow:
    """One dataset sample that could not be used, and why."""

    sample_id: str
    reason: str
    message: str


@dataclass(frozen=True)
class RunFolder:
    """A run read from its folder. Missing files give empty values or None."""

    name: str
    steps: Sequence[StepRecord]
    evaluations: Sequence[EvaluationRecord]  # of the run's own held-out suite, by version
    suites: Mapping[str, Sequence[EvaluationRecord]]  # of the other suites, by version
    samples: SampleFile
    summary: Summary | None
    plan: Sequence[RecordedPlanRow]
    skipped: Sequence[SkippedRow]
    faults: Sequence[Fault]
    config: str
    guard: Sequence[GuardEvent] = ()
    findings: Sequence[RunFinding] = ()  # of the newest diagnosis, the worst first
    pictures: Mapping[str, bytes] = field(default_factory=dict)  # path -> PNG, of the findings


def read_run_folder(folder: Path) -> RunFolder:
    """Reads a run folder. A run that failed early may lack any of the files.

    Raises:
        ValueError: the folder does not exist, or a file has unexpected content.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no run folder {folder}: give the folder that holds {METRICS_FILE}")
    records = read_records(folder / METRICS_FILE)
    evaluations: dict[str, dict[int, EvaluationRecord]] = {HELD_OUT: {}}
    for record in records:
        if isinstance(record, EvaluationRecord):
            evaluations.setdefault(record.suite, {})[record.version] = record
    by_suite = {suite: [results[version] for version in sorted(results)] for suite, results in evaluations.items()}
    summary, config = folder / SUMMARY_FILE, folder / CONFIG_FILE
    findings = read_findings(folder)
    return RunFolder(
        name=folder.resolve().name,
        steps=[r for r in records if isinstance(r, StepRecord)],
        evaluations=by_suite.pop(HELD_OUT),
        suites=by_suite,
        samples=read_samples(folder / SAMPLES_FILE),
        summary=read_summary(summary) if summary.exists() else None,
        plan=[_plan_row(row) for row in _rows(folder / PLAN_FILE)],
        skipped=[_skipped_row(row) for row in _rows(folder / SKIPPED_FILE)],
        faults=read_faults(folder / FAULTS_FILE),
        config=config.read_text(encoding="utf-8") if config.exists() else "",
        guard=read_events(folder / GUARD_FILE),
        findings=findings,
        pictures=pictures_of(findings, folder),
    )


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    rows = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(rows, list):
        raise ValueError(f"{path} holds a {type(rows).__name__}: a list of rows is expected")
    return rows


def _plan_row(row: dict[str, Any]) -> RecordedPlanRow:
    return RecordedPlanRow(row["role"], row["index"], row["cpus"], row["gpus"], str(row["node"]), tuple(row["cores"]))


def _skipped_row(row: dict[str, Any]) -> SkippedRow:
    return SkippedRow(str(row["sample_id"]), row["reason"], row["message"])

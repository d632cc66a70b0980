"""A run read from its folder, and the findings of `mobula diagnose`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from mobula.cluster.files import write_atomically
from mobula.cluster.metrics.guard_events import GUARD_FILE, GuardEvent, read_events
from mobula.cluster.metrics.report.samples import SampleFile, read_samples
from mobula.cluster.metrics.sinks.jsonl import read_records
from mobula.cluster.metrics.step_records import HELD_OUT, EvaluationRecord, StepRecord, strict
from mobula.cluster.metrics.summary import Summary, read_summary
from mobula.cluster.workers.faults import FAULTS_FILE, Fault, read_faults

DIAGNOSIS_FILE = "diagnosis.json"
PICTURES_FOLDER = "diagnosis"  # in the run folder


class RunVerdict(StrEnum):
    """In the order in which findings are shown."""

    FAULT = "fault"  # the run cannot learn as configured, or its numbers are wrong
    WARNING = "warning"  # a likely reason why the reward does not rise
    NOTICE = "notice"  # unusual; may be intended
    OK = "ok"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Evidence:
    """A sample that shows the finding: a text, and pictures. `images` are paths of PNG files below the run folder, or
    keys of thumbnails in `samples.jsonl`. `pngs` are pictures that `with_files` has not written yet."""

    text: str
    images: tuple[str, ...] = ()
    pngs: tuple[bytes, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class RunFinding:
    """The result of one check.

    `measured` is a sentence with the numbers of `numbers`; of a check that was not measured, the reason. `action` names
    the key of the configuration to change; it is empty if nothing has to be done. `explains` names the checks whose
    faults and warnings may follow from this one.
    """

    name: str
    verdict: RunVerdict
    measured: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    action: str = ""
    evidence: tuple[Evidence, ...] = ()
    explains: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        is_measured = self.verdict is not RunVerdict.NOT_MEASURED
        assert bool(self.numbers) == is_measured, f"{self.name}: a verdict needs a number, and has {dict(self.numbers)}"


SERIOUS = (RunVerdict.FAULT, RunVerdict.WARNING)


def causes_first(findings: Sequence[RunFinding]) -> list[RunFinding]:
    """Returns the findings by verdict, with causes before what they explain.

    A fault or warning that another one explains comes after all that are unexplained, and its action names the cause.
    The others count as bad as the worst finding that they explain; of equally bad ones the one that explains more comes
    first. Findings that are equal in all this keep their order.
    """
    order = list(RunVerdict)
    serious = {finding.name: finding for finding in findings if finding.verdict in SERIOUS}
    cause_of: dict[str, str] = {}
    for cause in sorted(serious.values(), key=lambda each: -sum(name in serious for name in each.explains)):
        for name in cause.explains:
            if name in serious and name not in cause_of and name not in _chain(cause.name, cause_of):
                cause_of[name] = cause.name

    def key(finding: RunFinding) -> tuple[int, int, int, int]:
        if finding.verdict not in SERIOUS:
            return (2, order.index(finding.verdict), 0, 0)
        effects = [each for name, each in serious.items() if cause_of.get(name) == finding.name]
        worst = min(order.index(each.verdict) for each in (finding, *effects))
        return (int(finding.name in cause_of), worst, -len(effects), order.index(finding.verdict))

    def with_cause(finding: RunFinding) -> RunFinding:
        action = f"may follow from {cause_of[finding.name]}, see there first; {finding.action}"
        return replace(finding, action=action)

    return [with_cause(each) if each.name in cause_of else each for each in sorted(findings, key=key)]


def _chain(name: str, cause_of: Mapping[str, str]) -> list[str]:
    chain = [name]
    while chain[-1] in cause_of:
        chain.append(cause_of[chain[-1]])
    return chain


def with_files(findings: Sequence[RunFinding], folder: Path) -> list[RunFinding]:
    """Writes the pictures of the findings below `folder`/diagnosis, and returns the findings with their paths."""
    found = []
    for finding in findings:
        evidence = []
        for number, each in enumerate(finding.evidence):
            names = [f"{PICTURES_FOLDER}/{finding.name}-{number}-{n}.png" for n in range(len(each.pngs))]
            for name, png in zip(names, each.pngs, strict=True):
                (folder / PICTURES_FOLDER).mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(png)
            evidence.append(Evidence(each.text, (*each.images, *names)))
        found.append(replace(finding, evidence=tuple(evidence)))
    return found


def in_folder(findings: Sequence[RunFinding], folder: Path) -> list[RunFinding]:
    """Returns the findings with the paths of their pictures from the current directory."""
    return [
        replace(
            finding,
            evidence=tuple(
                replace(each, images=tuple(str(folder / i) if _is_path(i) else i for i in each.images))
                for each in finding.evidence
            ),
        )
        for finding in findings
    ]


def _is_path(image: str) -> bool:
    return image.startswith(f"{PICTURES_FOLDER}/")


def to_json(findings: Sequence[RunFinding]) -> str:
    """Formats findings as strict JSON: a list of objects with the names of the fields."""
    rows = [
        {
            **asdict(replace(finding, evidence=())),
            "numbers": strict(dict(finding.numbers)),
            "evidence": [{"text": each.text, "images": list(each.images)} for each in finding.evidence],
        }
        for finding in findings
    ]
    return json.dumps(rows, indent=1, allow_nan=False, ensure_ascii=False)


def write_findings(folder: Path, findings: Sequence[RunFinding]) -> None:
    write_atomically(folder / DIAGNOSIS_FILE, to_json(findings) + "\n")


def read_findings(folder: Path) -> list[RunFinding]:
    """The inverse of `write_findings`; empty if the file does not exist."""
    path = folder / DIAGNOSIS_FILE
    return TypeAdapter(list[RunFinding]).validate_json(path.read_bytes()) if path.exists() else []


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
    """Reads a run folder. A run that failed early may lack any of the files."""
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
    pictures = {name for finding in findings for each in finding.evidence for name in each.images if _is_path(name)}
    return RunFolder(
        name=folder.resolve().name,
        steps=[r for r in records if isinstance(r, StepRecord)],
        evaluations=by_suite.pop(HELD_OUT),
        suites=by_suite,
        samples=read_samples(folder / SAMPLES_FILE),
        summary=read_summary(summary) if summary.exists() else None,
        plan=TypeAdapter(list[RecordedPlanRow]).validate_python(_rows(folder / PLAN_FILE)),
        skipped=TypeAdapter(list[SkippedRow]).validate_python(_rows(folder / SKIPPED_FILE)),
        faults=read_faults(folder / FAULTS_FILE),
        config=config.read_text(encoding="utf-8") if config.exists() else "",
        guard=read_events(folder / GUARD_FILE),
        findings=findings,
        pictures={name: (folder / name).read_bytes() for name in sorted(pictures) if (folder / name).is_file()},
    )


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    rows = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(rows, list):
        raise ValueError(f"{path} holds a {type(rows).__name__}: a list of rows is expected")
    return rows

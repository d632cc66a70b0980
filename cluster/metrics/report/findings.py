"""Findings of `mobula diagnose`: verdict, measurement, next action and evidence; `diagnosis.json` of a run folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from mobula.cluster.metrics.files import write_atomically
from mobula.cluster.metrics.step_records import strict

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
    """A sample that shows the finding: a text, and pictures.

    `images` are paths of PNG files below the run folder, or keys of thumbnails in `samples.jsonl`. `pngs` are pictures
    that `with_files` has not written yet.
    """

    text: str
    images: tuple[str, ...] = ()
    pngs: tuple[bytes, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class RunFinding:
    """The result of one check.

    `measured` is a sentence with the numbers of `numbers`; of a check that was not measured, the reason. `action` names
    the key of the configuration to change; it is empty if nothing has to be done.
    """

    name: str
    verdict: RunVerdict
    measured: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    action: str = ""
    evidence: tuple[Evidence, ...] = ()

    def __post_init__(self) -> None:
        is_measured = self.verdict is not RunVerdict.NOT_MEASURED
        assert bool(self.numbers) == is_measured, f"{self.name}: a verdict needs a number, and has {dict(self.numbers)}"


def worst_first(findings: Sequence[RunFinding]) -> list[RunFinding]:
    """Returns the findings by verdict; findings of one verdict keep their order."""
    order = list(RunVerdict)
    return sorted(findings, key=lambda finding: order.index(finding.verdict))


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


def pictures_of(findings: Sequence[RunFinding], folder: Path) -> dict[str, bytes]:
    """Returns path -> PNG of the pictures of the findings that exist."""
    names = {name for finding in findings for each in finding.evidence for name in each.images if _is_path(name)}
    return {name: (folder / name).read_bytes() for name in sorted(names) if (folder / name).is_file()}


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
    """Writes `diagnosis.json` of a run folder."""
    write_atomically(folder / DIAGNOSIS_FILE, to_json(findings) + "\n")


def read_findings(folder: Path) -> list[RunFinding]:
    """The inverse of `write_findings`; empty if the file does not exist."""
    path = folder / DIAGNOSIS_FILE
    return [_finding(row) for row in json.loads(path.read_text(encoding="utf-8"))] if path.exists() else []


def _finding(row: Mapping[str, Any]) -> RunFinding:
    return RunFinding(
        name=row["name"],
        verdict=RunVerdict(row["verdict"]),
        measured=row["measured"],
        numbers={name: float(value) for name, value in row["numbers"].items()},
        action=row["action"],
        evidence=tuple(Evidence(each["text"], tuple(each["images"])) for each in row["evidence"]),
    )

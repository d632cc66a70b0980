"""Reads the contact sheets of a run's evaluations for its report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mobula.cluster.metrics.files import read_verified

EVALUATIONS_FOLDER = "evaluations"  # of the run folder
SHEETS_FILE = "sheets.json"  # in it: a row for each sheet


@dataclass(frozen=True)
class Sheet:
    """The images of one evaluation."""

    suite: str
    version: int
    sha256: str
    prompts: Sequence[str]
    png: bytes


def read_sheets(run_folder: Path) -> list[Sheet]:
    """Returns the first and the last sheet of each suite.

    Raises:
        ValueError: a file was changed after it was written.
    """
    folder = run_folder / EVALUATIONS_FOLDER
    if not (folder / SHEETS_FILE).exists():
        return []
    rows = json.loads((folder / SHEETS_FILE).read_text(encoding="utf-8"))
    by_suite: dict[str, list[dict[str, object]]] = {}
    for row in sorted(rows, key=lambda row: row["version"]):
        by_suite.setdefault(row["suite"], []).append(row)
    chosen = [row for sheets in by_suite.values() for row in (sheets if len(sheets) == 1 else (sheets[0], sheets[-1]))]
    return [_sheet(folder, row) for row in chosen]


def _sheet(folder: Path, row: Mapping[str, Any]) -> Sheet:
    digest = str(row["sha256"])
    png = read_verified(folder / str(row["file"]), digest, SHEETS_FILE)
    return Sheet(str(row["suite"]), int(str(row["version"])), digest, [str(p) for p in row["prompts"]], png)

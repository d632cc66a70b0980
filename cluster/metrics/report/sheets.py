"""Contact sheets of a run's evaluations, as its report shows them."""

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
    """The pictures of one evaluation."""

    suite: str
    version: int
    sha256: str
    prompts: Sequence[str]
    png: bytes


def read_sheets(run_folder: Path) -> list[Sheet]:
    """The first and the last sheet of each suite.

    Raises:
        ValueError: the content of a file differs from what was written.
    """
    folder = run_folder / EVALUATIONS_FOLDER
    if not (folder / SHEETS_FILE).exists():
        return []
    rows = json.loads((folder / SHEETS_FILE).read_text(encoding="utf-8"))
    by_suite: dict[str, list[dict[str, object]]] = {}
    for row in sorted(rows, key=lambda row: row["version"]):
        by_suite.setdefault(row["suite"], []).append(row)
    chosen = [row for found in by_suite.values() for row in (found if len(found) == 1 else (found[0], found[-1]))]
    return [_sheet(folder, row) for row in chosen]


def _sheet(folder: Path, row: Mapping[str, Any]) -> Sheet:
    digest = str(row["sha256"])
    png = read_verified(folder / str(row["file"]), digest, SHEETS_FILE)
    return Sheet(str(row["suite"]), int(str(row["version"])), digest, [str(p) for p in row["prompts"]], png)

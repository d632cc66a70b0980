"""Writes a run's numbers as CSV: `metrics.csv` with a row per step, `eval_metrics.csv` with a row per evaluation."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from mobula.cluster.metrics.files import write_atomically
from mobula.cluster.metrics.report.run_folder import RunFolder
from mobula.cluster.metrics.step_records import HELD_OUT, EvaluationRecord, StepRecord

STEPS_FILE, EVALUATIONS_FILE = "metrics.csv", "eval_metrics.csv"
Cell = float | int | str


def write_tables(folder: Path, run: RunFolder) -> None:
    """Writes both files, with a column for each number of any row; missing numbers are empty."""
    suites = {HELD_OUT: run.evaluations, **run.suites}
    write_atomically(folder / STEPS_FILE, table([_step(record) for record in run.steps]))
    rows = [_evaluation(record) for records in suites.values() for record in records]
    write_atomically(folder / EVALUATIONS_FILE, table(rows))


def table(rows: Sequence[Mapping[str, Cell]]) -> str:
    """Formats rows as CSV with a header."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _step(record: StepRecord) -> dict[str, Cell]:
    seconds = {f"{name}_s": value for name, value in record.seconds.items()}
    rewards = {f"r_{name}": value for name, value in record.components.items()}
    return {"step": record.step, **record.values, **rewards, **seconds}


def _evaluation(record: EvaluationRecord) -> dict[str, Cell]:
    own: dict[str, Cell] = {"suite": record.suite, "version": record.version, "accuracy": record.accuracy}
    num: dict[str, Cell] = {"num": record.num, "num_unscored": record.num_unscored}
    identity = {f"evaluation_{name}": value for name, value in record.identity.items()}
    return {**own, "low": record.low, "high": record.high, **num, **record.values, **identity}

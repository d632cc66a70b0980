"""JsonlSink: `metrics.jsonl`, one line a record, of which the report is made."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from cluster.metrics.files import write_atomically
from cluster.metrics.step_records import EvaluationRecord, MetricsRecord, StepRecord, from_line, record_version, to_line

_logger = logging.getLogger(__name__)


class JsonlSink:
    """Appends to `path`, one flushed line a record.

    A run that goes on from `version` did not keep what came later: those lines are cut, so that no curve has two
    values at one step. `kept` holds the earlier records.
    """

    name = "jsonl"

    def __init__(self, path: Path, *, version: int) -> None:
        self.kept = [r for r in read_records(path) if record_version(r) <= version]
        write_atomically(path, "".join(to_line(record) + "\n" for record in self.kept))
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def emit(self, record: StepRecord) -> None:
        self._file.write(to_line(record) + "\n")

    def emit_evaluation(self, record: EvaluationRecord) -> None:
        self._file.write(to_line(record) + "\n")

    def close(self) -> None:
        self._file.close()


def read_records(path: Path) -> list[MetricsRecord]:
    """All records of a `metrics.jsonl`, in order; none if there is no such file.

    The last line may be half written by a process that was killed: it is left out. A broken line before it is an error.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    records: list[MetricsRecord] = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(from_line(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ValueError(f"{path} line {number} is not JSON: {line[:80]!r}; remove that line") from error
            _logger.warning("%s: the last line is half written and left out", path)
    return records

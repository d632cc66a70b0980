"""JsonlSink: writes `metrics.jsonl`, one line per record, the source of the report."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TextIO

from mobula.cluster.files import write_atomically
from mobula.cluster.metrics.step_records import MetricsRecord, from_line, to_line

_logger = logging.getLogger(__name__)


class JsonlSink:
    """Appends to `path`, one flushed line per record. A run that resumes from `version` removes later lines, so that no
    curve has two values at one step. `kept` holds the earlier records."""

    name = "jsonl"

    def __init__(self, path: Path, *, version: int) -> None:
        self.kept = [r for r in read_records(path) if r.version <= version]
        self._file: TextIO | None = None
        self._error: OSError | None = None
        try:
            write_atomically(path, "".join(to_line(record) + "\n" for record in self.kept))
            self._file = path.open("a", buffering=1, encoding="utf-8")
        except OSError as error:  # a full disk: the first record fails, and the hub drops this sink
            self._error = error

    def emit(self, record: MetricsRecord) -> None:
        if self._error is not None:
            raise self._error
        assert self._file is not None
        self._file.write(to_line(record) + "\n")

    emit_evaluation = emit

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read_records(path: Path) -> list[MetricsRecord]:
    """Reads all records of a `metrics.jsonl`, in order; none if the file does not exist. A partial last line (of a
    killed process) is ignored. A broken line before it is an error."""
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

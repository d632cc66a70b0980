"""Faults of a run: each loss of a worker is one line of the log and one row of `faults.jsonl`.

    report_loss("rollout/0", error, "prompts in flight that are retried: 64")

logs one record whose first line names worker, kind and cause. The full traceback follows on further lines, which only
the log file shows. `FaultFile` is the handler that writes the rows, each with the step and the phase of the run.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mobula.cluster.errors import DeadlineError, EngineDiedError, EngineLostError, WorkerDiedError, loss_kind
from mobula.cluster.failures import at_frames, frames_in
from mobula.cluster.runtime.error_text import COLOUR, in_one_line
from mobula.cluster.workers.status import Progress

_logger = logging.getLogger(__name__)

FAULTS_FILE = "faults.jsonl"  # of the run folder


@dataclass(frozen=True)
class Fault:
    """One loss of one worker."""

    at_s: float  # seconds since the epoch
    worker: str  # rollout/0
    kind: str  # died, hung, ...
    cause: str  # one line
    step: int | None = None  # under way, 0 before the first; None in rows of older files, which have neither
    phase: str = ""  # of the loop, as in the status


def cause_of(error: Exception) -> str:
    """Why a worker was lost, in one line, with the innermost frames where they are known."""
    if isinstance(error, EngineDiedError | EngineLostError):
        return str(error.failure)
    if isinstance(error, WorkerDiedError | DeadlineError):
        return in_one_line(error)
    return f"{type(error).__name__}: {in_one_line(error)}{at_frames(frames_in(_notes(error)))}"


def report_loss(worker: str, error: Exception, consequence: str = "") -> Fault:
    """Log the loss of a worker, once; `consequence` describes what happens to its work."""
    fault = Fault(time.time(), worker, loss_kind(error), cause_of(error))
    line = f"{worker} is lost ({fault.kind}): {fault.cause}" + (f"; {consequence}" if consequence else "")
    details = _details(error)
    _logger.warning("%s", f"{line}\n{details}" if details else line, extra={"fault": fault})
    return fault


class FaultFile(logging.Handler):
    """Appends each fault that is logged to a file, as one line of JSON, with what `progress` returns at that moment."""

    def __init__(self, path: Path, progress: Callable[[], Progress]) -> None:
        super().__init__()
        self._path = path
        self._progress = progress
        self.addFilter(lambda record: hasattr(record, "fault"))

    def emit(self, record: logging.LogRecord) -> None:
        now = self._progress()
        fault = replace(record.__dict__["fault"], step=now.step, phase=now.phase)
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(fault)) + "\n")
        except OSError as error:
            _logger.warning("%s cannot be written (%s): a fault is missing in it", self._path, error)


def read_faults(path: Path) -> list[Fault]:
    """All faults of a run, in order; none if there is no such file. A last line that is half written is left out.

    Raises:
        ValueError: a line before the last one is broken.
    """
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    faults: list[Fault] = []
    for number, line in enumerate(lines, start=1):
        try:
            faults.append(Fault(**json.loads(line)))
        except (TypeError, ValueError) as error:
            if number < len(lines):
                raise ValueError(f"{path} line {number} is no fault: {line[:80]!r}; remove that line") from error
    return faults


def _details(error: Exception) -> str:
    """Everything that is known beyond the one line."""
    if isinstance(error, EngineDiedError | EngineLostError) and error.failure.traceback:
        return error.failure.traceback.rstrip()
    text = COLOUR.sub("", str(error)).strip()
    return "\n".join([*([text] if "\n" in text else []), _notes(error)]).strip()


def _notes(error: Exception) -> str:
    return "\n".join(getattr(error, "__notes__", ()))

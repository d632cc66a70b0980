"""Faults of a run: each loss of a worker is one line of the log and one row of `faults.jsonl`.

    report_loss("rollout/0", error, "prompts in flight that are retried: 64")

logs one record whose first line names worker, kind and cause. The traceback follows on further lines, which appear
only in the log file. `FaultFile` is the logging handler that writes the rows, each with step and phase of the run.
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
    step: int | None = None  # current step, 0 before the first; None in files of older versions
    phase: str = ""  # of the loop, as in the status


def cause_of(error: Exception) -> str:
    """Returns the cause of a loss in one line, with the innermost stack frames if they are known."""
    if isinstance(error, EngineDiedError | EngineLostError):
        return str(error.failure)
    if isinstance(error, WorkerDiedError | DeadlineError):
        return in_one_line(error)
    return f"{type(error).__name__}: {in_one_line(error)}{at_frames(frames_in(_notes(error)))}"


def report_loss(worker: str, error: Exception, consequence: str = "") -> Fault:
    """Logs the loss of a worker once. `consequence` describes the effect on its work."""
    fault = Fault(time.time(), worker, loss_kind(error), cause_of(error))
    line = f"{worker} is lost ({fault.kind}): {fault.cause}" + (f"; {consequence}" if consequence else "")
    details = _details(error)
    _logger.warning("%s", f"{line}\n{details}" if details else line, extra={"fault": fault})
    return fault


class FaultFile(logging.Handler):
    """Appends each logged fault to a file as a line of JSON, with the step and phase that `progress` returns."""

    def __init__(
        self, path: Path, progress: Callable[[], Progress], on_fault: Callable[[Fault], None] = lambda fault: None
    ) -> None:
        """`on_fault` gets each fault before it is written."""
        super().__init__()
        self._path = path
        self._progress = progress
        self._on_fault = on_fault
        self.addFilter(lambda record: hasattr(record, "fault"))

    def emit(self, record: logging.LogRecord) -> None:
        now = self._progress()
        fault = replace(record.__dict__["fault"], step=now.step, phase=now.phase)
        self._on_fault(fault)
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(fault_line(fault))
        except OSError as error:
            _logger.warning("%s cannot be written (%s): the file lacks this fault", self._path, error)


def fault_line(fault: Fault) -> str:
    """Formats a fault as one line of JSON, with its line feed."""
    return json.dumps(asdict(fault)) + "\n"


def read_faults(path: Path) -> list[Fault]:
    """Reads all faults of a run, in order; none if the file does not exist. A partial last line is ignored.

    Raises:
        ValueError: an earlier line is broken.
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
    """Returns the notes and the traceback of an error."""
    if isinstance(error, EngineDiedError | EngineLostError) and error.failure.traceback:
        return error.failure.traceback.rstrip()
    text = COLOUR.sub("", str(error)).strip()
    return "\n".join([*([text] if "\n" in text else []), _notes(error)]).strip()


def _notes(error: Exception) -> str:
    return "\n".join(getattr(error, "__notes__", ()))

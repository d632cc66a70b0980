"""Faults of workers: records, patterns and the prompts that are suspected."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mobula.cluster import errors
from mobula.cluster.failures import COLOUR, Failure, at_frames, frames_in, in_one_line
from mobula.cluster.files import append_line
from mobula.cluster.workers.status import Progress

if TYPE_CHECKING:  # logs are set up without numpy
    from mobula.cluster.records.trajectory import Prompt

_logger = logging.getLogger(__name__)

# Detects restart loops: engines that die again and again with the same cause.
#
# Every crash has a fingerprint of the cause. Consecutive deaths with equal fingerprints form a series. A death
# without a fingerprint (the process was killed from outside) neither belongs to a series nor ends it. Two patterns
# end a series before the restart budget is used up:
#     one prompt      it was in flight at each of MIN_DEATHS deaths or more, at the last one with no other prompt
#     pushes          MIN_DEATHS engines died one after the other within MAX_PUSHES pushes after their start, at least
#                     MIN_AFTER_PUSH of them after a push, and they have no prompt in common
# Prompts in flight at every death of a series are suspects. Few suspects run at a time; once few are left, each runs
# alone. A suspect is cleared when it finishes.

MIN_DEATHS = 3
MAX_PUSHES = 10
MIN_AFTER_PUSH = 2
MAX_ALONE = 4  # up to this number, suspects run alone from the second death on


@dataclass(frozen=True)
class Death:
    """One engine that was lost."""

    fingerprint: str | None  # of the cause; None: the engine was killed from outside, or did not answer
    num_pushes: int  # since the engine's start
    prompt_ids: frozenset[str]  # in flight


@dataclass(frozen=True)
class OnePrompt:
    """Finding: one prompt crashes every engine that samples it."""

    prompt_id: str
    num_deaths: int


@dataclass(frozen=True)
class AfterPushes:
    """Finding: engines crash soon after weight pushes."""

    num_deaths: int


class FaultPatterns:
    """Takes every death in order and classifies the series that the newest one belongs to.

    Example:
        patterns = FaultPatterns()
        for num_in_flight in (9, 3, 1):         # prompts including "0/7/s7"
            finding = patterns.died(Death("RuntimeError|model.py:7", 0, prompts[:num_in_flight]))
        finding                                 # OnePrompt("0/7/s7", num_deaths=3)
    """

    def __init__(self) -> None:
        self._fingerprint: str | None = None
        self._num_early = 0  # deaths in a row of engines that took MAX_PUSHES or fewer
        self._num_after_push = 0  # early deaths in a row after at least one push
        self._num_common = 0  # deaths in a row with a prompt in common
        self._suspects: frozenset[str] = frozenset()

    def died(self, death: Death) -> OnePrompt | AfterPushes | None:
        """Records a death. Returns a finding, if any; its prompt is no longer a suspect."""
        if death.fingerprint is None:
            return None
        if death.fingerprint != self._fingerprint:
            self._fingerprint = death.fingerprint
            self._begin()
        is_early = death.num_pushes <= MAX_PUSHES
        self._num_early = self._num_early + 1 if is_early else 0
        self._num_after_push = self._num_after_push + (death.num_pushes > 0) if is_early else 0
        common = self._suspects & death.prompt_ids
        self._num_common = self._num_common + 1 if common else 1
        self._suspects = common or death.prompt_ids
        if self._num_common >= MIN_DEATHS and len(death.prompt_ids) == 1:
            [prompt_id] = death.prompt_ids
            finding = OnePrompt(prompt_id, self._num_common)
            self._begin()
            return finding
        is_series = self._num_early >= MIN_DEATHS and self._num_after_push >= MIN_AFTER_PUSH
        if is_series and self._num_common < MIN_DEATHS:
            return AfterPushes(self._num_early)
        return None

    def finished(self, prompt_id: str) -> None:
        self._suspects -= {prompt_id}
        if not self._suspects:
            self._clear_suspects()

    def is_suspect(self, prompt_id: str) -> bool:
        """Whether the prompt was in flight at each of two deaths or more of the series."""
        return self._num_common > 1 and prompt_id in self._suspects

    @property
    def max_suspects_in_flight(self) -> int | None:
        """How many suspects may run at a time; None: no limit. The second death leaves up to as many suspects as there
        were prompts in flight. Running their square root at a time leaves at most that many after the third death."""
        if self._num_common < 2:
            return None
        return 1 if self.run_alone else math.isqrt(len(self._suspects))

    @property
    def run_alone(self) -> bool:
        """Whether suspects run one at a time: a further death then identifies the prompt."""
        return self._num_common > 2 or (self._num_common == 2 and len(self._suspects) <= MAX_ALONE)

    def _begin(self) -> None:
        self._num_early = 0
        self._num_after_push = 0
        self._clear_suspects()

    def _clear_suspects(self) -> None:
        self._num_common = 0
        self._suspects = frozenset()


# Faults of a run: each loss of a worker is one line of the log and one row of `faults.jsonl`.
#
#     report_loss("rollout/0", error, "prompts in flight that are retried: 64")
#
# logs one record whose first line names worker, kind and cause. The traceback follows on further lines, which appear
# only in the log file. `FaultFile` is the logging handler that writes the rows, each with step and phase of the run.

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
    if isinstance(error, errors.EngineDiedError | errors.EngineLostError):
        return str(error.failure)
    if isinstance(error, errors.WorkerDiedError | errors.DeadlineError):
        return in_one_line(error)
    return f"{type(error).__name__}: {in_one_line(error)}{at_frames(frames_in(_notes(error)))}"


def report_loss(worker: str, error: Exception, consequence: str = "") -> Fault:
    """Logs the loss of a worker once. `consequence` describes the effect on its work."""
    fault = Fault(time.time(), worker, errors.loss_kind(error), cause_of(error))
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
            append_line(self._path, fault_line(fault))
        except OSError as error:
            _logger.warning("%s cannot be written (%s): the file lacks this fault", self._path, error)


def fault_line(fault: Fault) -> str:
    return json.dumps(asdict(fault))


def read_faults(path: Path) -> list[Fault]:
    """Reads all faults of a run, in order; none if the file does not exist. A partial last line is ignored."""
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
    if isinstance(error, errors.EngineDiedError | errors.EngineLostError) and error.failure.traceback:
        return error.failure.traceback.rstrip()
    text = COLOUR.sub("", str(error)).strip()
    return "\n".join([*([text] if "\n" in text else []), _notes(error)]).strip()


def _notes(error: Exception) -> str:
    return "\n".join(getattr(error, "__notes__", ()))


class Suspects:
    """Admits prompts to engines. After each death of an engine it holds suspects back and excludes proven causes.

    Example:
        async with suspects.admitted(prompt):
            return await engine.generate(prompt, settings)
        ...
        finding = suspects.engine_died(error, num_pushes, in_flight)    # an error that ends the run, or None
    """

    def __init__(self, on_excluded: Callable[[Prompt, errors.ExcludedPromptError], None]) -> None:
        """`on_excluded` is called once for each excluded prompt."""
        self._on_excluded = on_excluded
        self._patterns = FaultPatterns()
        self._excluded: dict[tuple[str, str], errors.ExcludedPromptError] = {}
        self._num_in_flight: Counter[str] = Counter()  # prompt id -> calls
        self._waiting: Counter[str] = Counter()
        self._changed = asyncio.Event()  # set, and replaced, whenever a suspect may go on

    @asynccontextmanager
    async def admitted(self, prompt: Prompt) -> AsyncIterator[None]:
        """Waits until the prompt may go to an engine, and counts it as in flight while the body runs. A suspect waits
        for earlier suspects. Each has a deadline."""
        self._refuse_if_excluded(prompt)
        self._waiting[prompt.prompt_id] += 1
        try:
            # Few suspects at a time: if an engine dies again, fewer prompts can be the cause.
            while self._must_wait(prompt.prompt_id):
                await self._changed.wait()
                self._refuse_if_excluded(prompt)
        finally:
            self._waiting -= Counter([prompt.prompt_id])
        self._num_in_flight[prompt.prompt_id] += 1
        try:
            yield
            self._patterns.finished(prompt.prompt_id)
        finally:
            self._num_in_flight -= Counter([prompt.prompt_id])
            self._notify()

    def engine_died(
        self, error: Exception, num_pushes: int, in_flight: dict[str, Prompt]
    ) -> errors.RestartLoopError | None:
        """Records a death. A finding excludes a prompt, or is returned as the error that ends the run."""
        failure = error.failure if isinstance(error, errors.EngineDiedError | errors.WorkerDiedError) else None
        failure = failure or Failure(cause_of(error))
        finding = self._patterns.died(Death(failure.fingerprint, num_pushes, frozenset(in_flight)))
        if isinstance(finding, OnePrompt):
            self._exclude(in_flight[finding.prompt_id], finding, failure)
        self._notify()
        if isinstance(finding, AfterPushes):
            return errors.RestartLoopError(
                f"{finding.num_deaths} engines in a row died within {MAX_PUSHES} weight pushes after their start, with "
                f"the same cause: {failure}. A restart does not help, so the run ends before "
                "supervision.max_restarts is reached. Look for the cause in the engine or its settings (sampler.*, "
                "weight_sync.kv_cache), then go on with resume=auto"
            )
        return None

    def _exclude(self, prompt: Prompt, finding: OnePrompt, failure: Failure) -> None:
        error = errors.ExcludedPromptError(
            f"prompt {prompt.prompt_id} (sample {prompt.sample_id}) is excluded: it was in flight at each of "
            f"{finding.num_deaths} deaths of engines with the same cause: {failure}"
        )
        self._excluded[_row(prompt)] = error
        _logger.warning("%s; the run continues without it", error)
        self._on_excluded(prompt, error)

    def _refuse_if_excluded(self, prompt: Prompt) -> None:
        if (error := self._excluded.get(_row(prompt))) is not None:
            raise errors.ExcludedPromptError(str(error))

    def _must_wait(self, prompt_id: str) -> bool:
        limit = self._patterns.max_suspects_in_flight
        if limit is None:
            return False
        if not self._patterns.is_suspect(prompt_id):
            return self._patterns.run_alone and self._num_suspects(self._num_in_flight + self._waiting) > 0
        if self._patterns.run_alone:
            return self._num_in_flight.total() > 0
        return self._num_suspects(self._num_in_flight) >= limit

    def _num_suspects(self, calls: Counter[str]) -> int:
        return sum(num for prompt_id, num in calls.items() if self._patterns.is_suspect(prompt_id))

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _row(prompt: Prompt) -> tuple[str, str]:
    """Identifies the data row of a prompt in every epoch: training prompts are numbered, others name their split."""
    split = prompt.prompt_id.partition("/")[0]
    return ("" if split.isdigit() else split, prompt.sample_id)

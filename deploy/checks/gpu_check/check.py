"""Runs the stages of a check, each with a deadline."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from signal import Signals

from mobula.deploy.checks.gpu_check.results import (
    ROOT,
    STAGES,
    CheckedMachine,
    CheckResults,
    CheckStage,
    Outcome,
    StageResult,
    read_results,
    row,
    stage_named,
)
from mobula.deploy.host.machine import commit_of
from mobula.deploy.host.processes import last_lines, run_logged

RESULTS_FILE = "gpu_check.json"


LEAST_S = 20.0  # a stage with less time than this is left for the next call


OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}


Say = Callable[[str], None]


@dataclass(frozen=True)
class CheckOptions:
    """Options of the check. Finished stages of `folder` are skipped unless listed in `only`."""

    device: str  # cpu | cuda
    folder: Path  # of the results, the logs and the files of stages
    only: tuple[str, ...] = ()
    runs_long: bool = False  # long stages on a CPU too
    budget_s: float | None = None  # of this call; a stage that it cuts is not finished


def check(options: CheckOptions, say: Say) -> CheckResults:
    """Runs the unfinished stages; calls `say` with one line per stage."""
    chosen = [stage_named(name) for name in options.only] or list(STAGES)
    deadline = None if options.budget_s is None else time.monotonic() + options.budget_s
    options.folder.mkdir(parents=True, exist_ok=True)
    file = options.folder / RESULTS_FILE
    results = _opened(file, CheckedMachine.here(options.device))
    for stage in chosen:
        if not options.only and _is_finished(stage, results, options):
            continue
        timeout_s = stage.timeout_s if deadline is None else min(stage.timeout_s, deadline - time.monotonic())
        result = _run(stage, results.machine, options.folder, timeout_s)
        if result is None:
            say(f"{stage.title}: out of time, run the same command again to go on with it")
            break
        results.stages[stage.name] = result
        results.write(file)
        say(row(stage.title, result))
    return results


def _opened(file: Path, machine: CheckedMachine) -> CheckResults:
    if not file.is_file():
        return CheckResults(machine)
    results = read_results(file)
    if results.machine != machine:
        raise ValueError(
            f"{file} holds results of {results.machine.name} with other packages or another device: "
            "give another --folder"
        )
    return results


def _is_finished(stage: CheckStage, results: CheckResults, options: CheckOptions) -> bool:
    """Failed stages count as finished, so that a repeated call spends its time on the other stages."""
    if stage.is_long and options.device == "cpu" and not options.runs_long:
        return True
    result = results.stages.get(stage.name)
    return result is not None and result.outcome is not Outcome.NOT_HERE


def _run(stage: CheckStage, machine: CheckedMachine, folder: Path, timeout_s: float) -> StageResult | None:
    """The result; None if there is not enough time, or `timeout_s` was less than the stage's own and it ran out."""
    missing = stage.unmet(machine.num_gpus)
    if machine.device == "cuda" and machine.num_gpus == 0 and stage is not STAGES[0]:  # which says why
        missing = "no GPU that torch can use: see the first stage, or check --device cpu"
    if missing:
        return StageResult(Outcome.NOT_HERE, missing)
    if timeout_s < min(LEAST_S, stage.timeout_s):
        return None
    started = time.monotonic()
    result = _in_process(stage, machine.device, folder, timeout_s)
    if result is None and timeout_s < stage.timeout_s:
        return None
    result = result or StageResult(Outcome.FAILED, f"not done within {timeout_s:g} s; see {_log(stage, folder)}")
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return replace(
        result, seconds=round(time.monotonic() - started, 1), finished_at=now, commit=commit_of(ROOT, "--short=12")
    )


def _in_process(stage: CheckStage, device: str, folder: Path, timeout_s: float) -> StageResult | None:
    """The result of a stage in a new process; None if it was not done in time."""
    own, result, log = folder / stage.name, folder / f"{stage.name}.json", _log(stage, folder)
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir()
    result.unlink(missing_ok=True)
    command = [
        "-m",
        "mobula.deploy.checks.gpu_check.child",
        stage.name,
        device,
        *(str(p.resolve()) for p in (own, result)),
    ]
    try:
        code = run_logged([sys.executable, *command], {**os.environ, **OFFLINE}, ROOT, log, timeout_s)
    except TimeoutError:
        return None
    finally:
        shutil.rmtree(own, ignore_errors=True)
    if not result.is_file():
        return StageResult(Outcome.FAILED, _crash(code, log))
    fields = json.loads(result.read_text(encoding="utf-8"))
    result.unlink()
    return StageResult(**{**fields, "outcome": Outcome(fields["outcome"])})


def _log(stage: CheckStage, folder: Path) -> Path:
    return folder / f"{stage.name}.log"


def _crash(code: int, log: Path) -> str:
    ended = f"killed by {Signals(-code).name}" if code < 0 else f"ended with {code}"
    return f"its process was {ended}: {' '.join(last_lines(log, 1)) or 'it wrote nothing'} (see {log})"


def failed(results: CheckResults) -> Sequence[str]:
    """The names of the stages that failed."""
    return [name for name, result in results.stages.items() if result.outcome is Outcome.FAILED]

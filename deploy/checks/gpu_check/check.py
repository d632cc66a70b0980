"""Runs the stages of the GPU check, each with a deadline in a process of its own, and keeps and shows their results."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from importlib import import_module, metadata
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path
from signal import Signals
from typing import Any, NoReturn

from mobula.cluster.files import write_atomically
from mobula.deploy.host.processes import ROOT, checkout_commit, last_lines, run_logged

ENGINE = ("vllm", "ray")
JOB = (*ENGINE, "typer", "rich")


@dataclass(frozen=True)
class CheckStage:
    """One row of the table, the function `check_NAME` of `module` in this package."""

    name: str
    title: str
    timeout_s: float
    packages: tuple[str, ...] = ()  # that it imports besides torch, transformers, peft, Hydra and pydantic
    num_gpus: int = 0  # at least; 0 runs on `--device cpu` as well
    is_long: bool = False  # runs by name or with `--all` where the device is a CPU
    missing: str = ""  # why no machine can run it yet
    module: str = "training"

    def unmet(self, num_gpus: int) -> str:
        """What is missing on a machine with `num_gpus` GPUs that torch can use; empty if nothing is."""
        if self.missing:
            return self.missing
        absent = [name for name in self.packages if find_spec(name) is None]
        if absent:
            return f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'} not installed"
        if num_gpus < self.num_gpus:
            return f"{self.num_gpus} GPU{'s' if self.num_gpus > 1 else ''} that torch can use; there are {num_gpus}"
        return ""


STAGES = (
    CheckStage("torch_cuda", "torch and CUDA", 180, module="numerics"),
    CheckStage("learner", "learner with the transformers sampler", 300),
    CheckStage("quantised", "adapters on a base of 4 bits", 300, ("torchao",)),
    CheckStage("packing", "packed rows against row by row", 300),
    CheckStage("sharding", "FSDP2 on one and on more ranks", 400),
    CheckStage("flow", "flow policy and its kernels", 200, module="numerics"),
    CheckStage("flow_sampler", "flow sampler and learner", 300, ("diffusers",)),
    CheckStage("logprob_memory", "memory of chunked log-probs", 300, module="numerics"),
    CheckStage("sleep", "sleep and wake of sampler and learner", 300),
    CheckStage("engine", "vLLM engine: parity, push, canary", 600, ENGINE),
    CheckStage("nccl_push", "push over NCCL", 900, JOB, num_gpus=2),
    CheckStage("tensor_parallel", "vLLM engine over two GPUs", 600, ENGINE, num_gpus=2),
    CheckStage(
        "colocated_ipc", "colocated push by CUDA IPC", 1, missing="its test is tests/gpu/test_transfer_on_gpus.py"
    ),
    CheckStage("main_job", "main job", 900, JOB, is_long=True),
    CheckStage("pretrained", "a pretrained model", 600),
    CheckStage("throughput", "tokens per second, memory and MFU", 600),
)


def stage_named(name: str) -> CheckStage:
    for stage in STAGES:
        if stage.name == name:
            return stage
    raise ValueError(f"{name} is no stage of the GPU check: choose {', '.join(s.name for s in STAGES)}")


PACKAGES = ("torch", "transformers", "vllm", "ray", "peft")


class Outcome(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_HERE = "not here"


@dataclass(frozen=True)
class StageResult:
    outcome: Outcome
    cause: str = ""  # of a failure, or what is missing
    figures: Mapping[str, float | int | str] = field(default_factory=dict)
    seconds: float = 0.0
    finished_at: str = ""  # UTC, to the second
    commit: str = ""  # of this project; empty outside a git checkout


@dataclass(frozen=True)
class CheckedMachine:
    device: str  # cpu | cuda
    name: str  # of the card or of the processor's architecture
    num_gpus: int
    python: str
    packages: Mapping[str, str]  # name -> version; without those that are not installed

    @classmethod
    def here(cls, device: str) -> CheckedMachine:
        import torch

        num_gpus = torch.cuda.device_count() if device == "cuda" else 0
        name = torch.cuda.get_device_name(0) if num_gpus else f"{platform.machine()} with {os.cpu_count()} cores"
        return cls(device, name, num_gpus, platform.python_version(), _versions())


@dataclass
class CheckResults:
    machine: CheckedMachine
    stages: dict[str, StageResult] = field(default_factory=dict)

    def write(self, file: Path) -> None:
        write_atomically(file, json.dumps(asdict(self), indent=1) + "\n")


def read_results(file: Path) -> CheckResults:
    try:
        fields: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        stages = {
            name: StageResult(**{**stage, "outcome": Outcome(stage["outcome"])})
            for name, stage in fields["stages"].items()
        }
        return CheckResults(CheckedMachine(**fields["machine"]), stages)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{file} holds no results of a GPU check ({error}): remove it or give another --folder"
        ) from error


def _versions() -> dict[str, str]:
    """Returns the versions of importable packages; vLLM's CPU build has another distribution name."""
    named = packages_distributions()
    return {name: metadata.version(named[name][0]) for name in PACKAGES if find_spec(name) is not None}


WIDTH = 38  # of a title


def row(title: str, result: StageResult) -> str:
    text = result.cause if result.outcome is not Outcome.PASSED else figures(result.figures)
    return f"{title:<{WIDTH}}  {result.outcome:<8}  {result.seconds:6.1f} s  {text}".rstrip()


def figures(values: Mapping[str, float | int | str]) -> str:
    """`name value` pairs, numbers with three digits."""
    return ", ".join(f"{name} {v if isinstance(v, str) else f'{v:,.3g}'}" for name, v in values.items())


def table(results: CheckResults) -> str:
    machine = results.machine
    packages = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    gpus = f"{machine.num_gpus} x {machine.name}" if machine.num_gpus else machine.name
    lines = [f"{gpus}; Python {machine.python}, {packages}"]
    lines += [row(stage.title, results.stages[stage.name]) for stage in STAGES if stage.name in results.stages]
    return "\n".join(lines)


RESULTS_FILE = "gpu_check.json"
LEAST_S = 20.0  # a stage with less time than this is left for the next call
CHILD = "import sys; from mobula.deploy.checks.gpu_check.check import run_stage; run_stage(*sys.argv[1:])"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True)
class CheckOptions:
    """Options of the check. Finished stages of `folder` are skipped unless listed in `only`."""

    device: str  # cpu | cuda
    folder: Path  # of the results, the logs and the files of stages
    only: tuple[str, ...] = ()
    runs_long: bool = False  # long stages on a CPU too
    budget_s: float | None = None  # of this call; a stage that it cuts is not finished


def check(options: CheckOptions, say: Callable[[str], None]) -> CheckResults:
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
    return replace(result, seconds=round(time.monotonic() - started, 1), finished_at=now, commit=checkout_commit(12))


def _in_process(stage: CheckStage, device: str, folder: Path, timeout_s: float) -> StageResult | None:
    own, result, log = folder / stage.name, folder / f"{stage.name}.json", _log(stage, folder)
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir()
    result.unlink(missing_ok=True)
    command = [sys.executable, "-c", CHILD, stage.name, device, *(str(path.resolve()) for path in (own, result))]
    try:
        code = run_logged(command, {**os.environ, **OFFLINE}, ROOT, log, timeout_s)
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


def run_stage(name: str, device: str, folder: str, result: str) -> NoReturn:
    """Runs one stage in this process, which ends."""
    from mobula.deploy.checks.gpu_check.roles import Context, NotHereError

    module = import_module(f"mobula.deploy.checks.gpu_check.{stage_named(name).module}")
    try:
        figures = getattr(module, f"check_{name}")(Context(device, Path(folder)))
        outcome = StageResult(Outcome.PASSED, figures=dict(figures))
    except NotHereError as error:
        outcome = StageResult(Outcome.NOT_HERE, str(error))
    except Exception as error:  # a failed row, whatever it is; the traceback goes to the log of the stage
        traceback.print_exc()
        outcome = StageResult(Outcome.FAILED, f"{type(error).__name__}: {' '.join(str(error).split())}")
    Path(result).write_text(json.dumps(asdict(outcome)), encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an interpreter that ends in order is aborted by threads of an engine's libraries


def run_check(options: CheckOptions) -> int:
    """Prints a line for each stage as it ends, and the table of all finished ones; returns the exit code."""

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    try:
        results = check(options, say)
    except ValueError as error:
        say(str(error))
        return 2
    say("\n" + table(results))
    return int(any(result.outcome is Outcome.FAILED for result in results.stages.values()))

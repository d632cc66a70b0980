"""Stages by name, their results and the table."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from importlib import metadata
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any

from mobula.cluster.files import write_atomically

ENGINE = ("vllm", "ray")


JOB = (*ENGINE, "typer", "rich")


@dataclass(frozen=True)
class CheckStage:
    """One row of the table; `mobula.deploy.checks.gpu_check.stages.NAME` has its `run`."""

    name: str
    title: str
    timeout_s: float
    packages: tuple[str, ...] = ()  # that it imports besides torch, transformers, peft, Hydra and pydantic
    num_gpus: int = 0  # at least; 0 runs on `--device cpu` as well
    is_long: bool = False  # runs by name or with `--all` where the device is a CPU
    missing: str = ""  # why no machine can run it yet

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
    CheckStage("torch_cuda", "torch and CUDA", 180),
    CheckStage("learner", "learner with the transformers sampler", 300),
    CheckStage("packing", "packed rows against row by row", 300),
    CheckStage("sharding", "FSDP2 on one and on more ranks", 400),
    CheckStage("flow", "flow policy and its kernels", 200),
    CheckStage("flow_sampler", "flow sampler and learner", 300, ("diffusers",)),
    CheckStage("logprob_memory", "memory of chunked log-probs", 300),
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
    """The stage of this name."""
    for stage in STAGES:
        if stage.name == name:
            return stage
    raise ValueError(f"{name} is no stage of the GPU check: choose {', '.join(s.name for s in STAGES)}")


ROOT = Path(__file__).parents[3]


PACKAGES = ("torch", "transformers", "vllm", "ray", "peft")


class Outcome(StrEnum):
    """Outcome of a stage."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_HERE = "not here"


@dataclass(frozen=True)
class StageResult:
    """One finished stage."""

    outcome: Outcome
    cause: str = ""  # of a failure, or what is missing
    figures: Mapping[str, float | int | str] = field(default_factory=dict)
    seconds: float = 0.0
    finished_at: str = ""  # UTC, to the second
    commit: str = ""  # of this project; empty outside a git checkout


@dataclass(frozen=True)
class CheckedMachine:
    """The machine that was checked."""

    device: str  # cpu | cuda
    name: str  # of the card or of the processor's architecture
    num_gpus: int
    python: str
    packages: Mapping[str, str]  # name -> version; without those that are not installed

    @classmethod
    def here(cls, device: str) -> CheckedMachine:
        """This machine."""
        import torch

        num_gpus = torch.cuda.device_count() if device == "cuda" else 0
        name = torch.cuda.get_device_name(0) if num_gpus else f"{platform.machine()} with {os.cpu_count()} cores"
        return cls(device, name, num_gpus, platform.python_version(), _versions())


@dataclass
class CheckResults:
    """The machine and its finished stages by name."""

    machine: CheckedMachine
    stages: dict[str, StageResult] = field(default_factory=dict)

    def write(self, file: Path) -> None:
        """Replaces the file as a whole."""
        write_atomically(file, json.dumps(asdict(self), indent=1) + "\n")


def read_results(file: Path) -> CheckResults:
    """Reads the file written by `CheckResults.write`."""
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
    """One line: title, outcome, seconds, and figures or the cause."""
    text = result.cause if result.outcome is not Outcome.PASSED else figures(result.figures)
    return f"{title:<{WIDTH}}  {result.outcome:<8}  {result.seconds:6.1f} s  {text}".rstrip()


def figures(values: Mapping[str, float | int | str]) -> str:
    """`name value` pairs, numbers with three digits."""
    return ", ".join(f"{name} {v if isinstance(v, str) else f'{v:,.3g}'}" for name, v in values.items())


def table(results: CheckResults) -> str:
    """All finished stages in their order, under a line about the machine."""
    machine = results.machine
    packages = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    gpus = f"{machine.num_gpus} x {machine.name}" if machine.num_gpus else machine.name
    lines = [f"{gpus}; Python {machine.python}, {packages}"]
    lines += [row(stage.title, results.stages[stage.name]) for stage in STAGES if stage.name in results.stages]
    return "\n".join(lines)


def status_rows(all_results: list[CheckResults]) -> str:
    """The Markdown table of docs/supported.md: where, when and at which commit each stage passed, a machine a row."""
    lines = ["| stage | passed on | failed on |", "|---|---|---|"]
    for stage in STAGES:
        found = [
            (results.machine, results.stages[stage.name]) for results in all_results if stage.name in results.stages
        ]
        passed, failed = (
            [_cell(machine, result) for machine, result in found if result.outcome is outcome]
            for outcome in (Outcome.PASSED, Outcome.FAILED)
        )
        columns = ([stage.title], passed or [stage.missing or "nowhere yet"], failed or ["-"])
        lines += [f"| {' | '.join(cells)} |" for cells in zip_longest(*columns, fillvalue="")]
    return "\n".join(lines)


def _cell(machine: CheckedMachine, result: StageResult) -> str:
    """Machine, torch, day and commit."""
    gpus = f" x {machine.num_gpus}" if machine.num_gpus > 1 else ""
    when = ", ".join(filter(None, (result.finished_at[:10], result.commit)))
    return f"{machine.name}{gpus}, torch {machine.packages['torch']} ({when})"

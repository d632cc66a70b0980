"""The results of a check: one JSON file, to which each finished stage is added."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from importlib import metadata
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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
        part = file.with_suffix(".part")
        part.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        part.replace(file)


def read_results(file: Path) -> CheckResults:
    """Reads the file written by `CheckResults.write`.

    Raises:
        ValueError: the file holds something else.
    """
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


def commit() -> str:
    """The commit of this checkout, with `+` if files differ from it; empty outside one."""
    found = [_git("rev-parse", "--short=12", "HEAD"), _git("status", "--porcelain", "--untracked-files=no")]
    return "" if not found[0] else found[0] + ("+" if found[1] else "")


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _versions() -> dict[str, str]:
    """Returns the versions of importable packages; vLLM's CPU build has another distribution name."""
    named = packages_distributions()
    return {name: metadata.version(named[name][0]) for name in PACKAGES if find_spec(name) is not None}

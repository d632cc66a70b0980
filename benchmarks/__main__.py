"""`python -m benchmarks NAME [KEY=VALUE]...`: measure one claim, or all of them in turn."""

from __future__ import annotations

import subprocess
import sys
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from benchmarks.harness.measure import FULL, QUICK
from benchmarks.harness.report import BASELINES, Report, describe, problems, read, tables, write
from mobula.configs.errors import ConfigError
from mobula.configs.load import load_config
from mobula.configs.overrides import overridden

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

FAILED = 1
USER_ERROR = 2


class Name(StrEnum):
    """A module of this package whose `measure(effort, overrides)` gives Findings."""

    ROLLOUT = "rollout"
    WEIGHT_SYNC = "weight_sync"
    WEIGHT_CHANGES = "weight_changes"
    REPLAY = "replay"
    STEP_BREAKDOWN = "step_breakdown"
    WHOLE_STEP = "whole_step"
    ASYNCHRONY = "asynchrony"
    DIGITS_ASYNCHRONY = "digits_asynchrony"
    LONG_RESPONSES = "long_responses"
    DRIVER_OVERHEAD = "driver_overhead"
    RECOVERY = "recovery"
    REWARD_POOL = "reward_pool"
    SCORE_RECORDS = "score_records"
    HTTP_REWARDS = "http_rewards"
    PACKING = "packing"
    LOGPROB_MEMORY = "logprob_memory"
    RANK_SHARES = "rank_shares"
    LEARNER_RANKS = "learner_ranks"
    REHEARSALS = "rehearsals"
    SHARED_PROMPTS = "shared_prompts"
    REFERENCE_QUANTISATION = "reference_quantisation"
    DATA_READING = "data_reading"
    PLANNER = "planner"
    LEARNER_MEMORY = "learner_memory"
    EPISODES = "episodes"
    FLOW = "flow"
    MEDIA_PREPARATION = "media_preparation"
    MEDIA_SIBLINGS = "media_siblings"
    AUDIT_COST = "audit_cost"
    ADAPTER_BATCHES = "adapter_batches"
    TRAINING_SERVICE = "training_service"
    ALL = "all"


@app.command()
def main(
    name: Annotated[Name, typer.Argument(help="What to measure.")] = Name.ALL,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="As for mobula.")] = None,
    quick: Annotated[bool, typer.Option(help="A short run that shows whether it works; writes no baseline.")] = False,
    check: Annotated[bool, typer.Option(help="Compare with the committed baseline and write none.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write the report there instead of baselines/NAME.json.")] = None,
) -> None:
    """Measure a ratio and write it down; exit code 1 if it misses its target (with --check: or lags the baseline)."""
    if name is Name.ALL:
        raise typer.Exit(_all(sys.argv[1:]))
    baseline = BASELINES / f"{name}.json"
    if check and not baseline.exists():
        _refuse(f"there is no {baseline} to compare with: run `python -m benchmarks {name}` and commit what it writes")
    report = _measure(name, quick, overrides or [])
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(*tables(report), sep="\n")
    target = output or (None if quick or check else baseline)
    if target is not None:
        write(report, target)
    found = problems(report.findings, read(baseline).findings if check else report.findings)
    for problem in found:
        console.print(f"not met: {problem}", style="red", markup=False)
    raise typer.Exit(FAILED if found else 0)


def _measure(name: Name, quick: bool, overrides: list[str]) -> Report:
    try:
        device = load_config(overridden(["experiment=digits"], overrides)).resources.device
    except ConfigError as error:
        _refuse(str(error))
    findings = import_module(f"benchmarks.{name}").measure(QUICK if quick else FULL, overrides)
    return describe(name, device, [*overrides, *(["--quick"] if quick else [])], findings)


def _refuse(message: str) -> NoReturn:
    Console(stderr=True, soft_wrap=True).print(message, style="red", markup=False)
    raise typer.Exit(USER_ERROR)


def _all(arguments: list[str]) -> int:
    """Each in a process of its own, so that none finds the machine as another left it."""
    rest = [argument for argument in arguments if argument != Name.ALL]
    names = [name for name in Name if name is not Name.ALL]
    codes = [subprocess.run([sys.executable, "-m", "benchmarks", name, *rest]).returncode for name in names]
    return max(codes)


if __name__ == "__main__":
    app()

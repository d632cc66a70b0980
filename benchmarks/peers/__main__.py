"""Measures works and prints the table of all results: `python -m benchmarks.peers [WORK]... [--rounds 5]`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness.report import BASELINES, cpu_model
from benchmarks.peers.rounds import run_once, take_turns
from benchmarks.peers.table import Result, markdown, read, write
from benchmarks.peers.works import WORKS
from benchmarks.peers.works.work import ENVIRONMENTS, NUM_WARMUP, Work


def main(
    names: Annotated[list[str] | None, typer.Argument(metavar="[WORK]...", help=", ".join(WORKS))] = None,
    rounds: Annotated[int, typer.Option(min=0, help="Of all sides; 0 prints the table alone.")] = 5,
    steps: Annotated[int, typer.Option(min=0, help="Counted steps of each run; 0: those of the work.")] = 0,
    since: Annotated[str, typer.Option(help="Leave out works measured since this UTC time: 2026-11-27T17:00.")] = "",
    results: Annotated[Path, typer.Option(help="Where each result is added.")] = BASELINES / "peers.json",
) -> None:
    """Each result is written when its work is done."""
    known = read(results)
    for name in left(names or list(WORKS), known, since) if rounds else []:
        if name not in WORKS:
            raise typer.BadParameter(f"there is no work {name}: choose from {', '.join(WORKS)}")
        if not (ENVIRONMENTS / WORKS[name].peer).is_dir():
            raise typer.BadParameter(f"{name} needs {ENVIRONMENTS / WORKS[name].peer}: make it with `make peers`")
        known[name] = _measured(WORKS[name], rounds, steps or WORKS[name].num_steps)
        write(results, known)
    print("\n".join(markdown(known)))


def left(names: Sequence[str], known: Mapping[str, Result], since: str) -> list[str]:
    """Works to measure: a command that was interrupted goes on with `since`."""
    return [name for name in names if not since or name not in known or known[name].date < since]


def _measured(work: Work, num_rounds: int, num_steps: int) -> Result:
    load, now = os.getloadavg()[0], datetime.now(UTC).isoformat(timespec="seconds")
    measured = take_turns(work.sides(num_steps), num_rounds, partial(run_once, num_warmup=NUM_WARMUP))
    return Result(work.name, now, cpu_model(), measured, work.targets, work.equal, work.unequal, load, work.unit)


if __name__ == "__main__":
    typer.run(main)

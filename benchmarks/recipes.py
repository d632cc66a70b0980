"""Every recipe on the digits task, several seeds each: held-out accuracy before and after RL as a table.

    python -m benchmarks.recipes [--algorithm grpo]... [--seeds 3] [--folder runs/recipes] [KEY=VALUE]...

Each run is one `mobula train` in a process of its own: seed 0 of every recipe, then seed 1 and so on. What a run
reached is written to `baselines/recipes.json` when it ends, and is not measured again, so the command may be stopped at
any time and goes on with the next run; a run that was stopped itself goes on from its checkpoint. With `--runs 1` it
ends after one run. The table of all that is known goes to the console and to `table.md`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import typer

from mobula.cluster.files import write_atomically
from mobula.cluster.metrics.report.run_folder import RunFolder, read_run_folder
from mobula.deploy.report.comparison import MAX_LINES, ComparedRuns, render_comparison

ALGORITHMS = ("grpo", "rloo", "reinforce_pp", "cpgd", "dapo", "gspo", "gmpo", "cispo", "dr_grpo", "ppo_gae", "distill")
TARGETS = {"ppo_gae": 0.80}  # held-out accuracy after RL; of the others TARGET
TARGET = 0.85
NEEDED = {
    "dapo": ("num_steps=80",),  # later, almost all groups of the digits are uniform
    "ppo_gae": ("algorithm.critic.warmup_steps=5",),
}
TEACHER = "teacher"  # the run whose policy `distill` learns from
RESULTS = Path(__file__).parent / "baselines" / "recipes.json"


@dataclass(frozen=True)
class Result:
    """One run that is done."""

    recipe: str
    seed: int
    before: float  # held-out accuracy of version 0
    after: float
    num_steps: int
    wall_s: float  # of the command; of its last part if it was stopped on the way
    date: str  # UTC
    cores: int
    overrides: tuple[str, ...]


def main(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="For every run.")] = None,
    algorithm: Annotated[list[str] | None, typer.Option(help="A recipe; all of them if left out.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each recipe: seeds 0, 1, ...")] = 3,
    folder: Annotated[Path, typer.Option(help="Where the runs go.")] = Path("runs/recipes"),
    runs: Annotated[int, typer.Option(min=0, help="End after so many runs; 0 writes the table alone.")] = 1_000,
    results: Annotated[Path, typer.Option(help="Where each run's result is added.")] = RESULTS,
) -> None:
    """Train each recipe with each seed, and write the table of all results."""
    words = overrides or []
    planned = [(name, seed) for seed, name in product(range(seeds), algorithm or ALGORITHMS)]
    known = _read(results)
    for name, seed in [run for run in planned if run not in known][:runs]:
        known[name, seed] = _measured(name, seed, folder, words)
        _write(results, known)
    text = "\n".join(_markdown(known))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.md").write_text(text + "\n", encoding="utf-8")
    _compare(folder, known)
    print(text)


def _measured(name: str, seed: int, folder: Path, words: Sequence[str]) -> Result:
    """Train one recipe from one seed, on from where an earlier command was stopped."""
    started = time.monotonic()
    needed = [*NEEDED.get(name, ()), *_teacher(name, folder, words)]
    run = _run(folder, f"{name}-{seed}", ["experiment=digits", f"algorithm={name}", f"seed={seed}", *needed, *words])
    wall_s = round(time.monotonic() - started, 1)
    assert run.summary is not None and run.summary.accuracy_before is not None, f"{name}-{seed} was not evaluated"
    assert run.summary.accuracy_after is not None, f"{name}-{seed} has no evaluation after its start"
    accuracies = (round(run.summary.accuracy_before, 4), round(run.summary.accuracy_after, 4))
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Result(name, seed, *accuracies, run.summary.num_steps, wall_s, now, os.cpu_count() or 0, tuple(words))


def _teacher(algorithm: str, folder: Path, overrides: Sequence[str]) -> list[str]:
    """The words that `distill` needs beside its seed: a teacher that was trained on the rewards."""
    if algorithm != "distill":
        return []
    _run(folder, TEACHER, ["experiment=digits", *overrides])
    return [f"algorithm.distillation.teacher={folder / TEACHER / 'policy'}"]


def _run(folder: Path, name: str, words: Sequence[str]) -> RunFolder:
    """The run of this name, trained unless it is done.

    Raises:
        subprocess.CalledProcessError: it failed; its output is on the console.
    """
    if not _is_done(folder / name):
        where = [f"folder={folder}", f"name={name}", "resume=auto", "metrics.progress=false"]
        subprocess.run([sys.executable, "-m", "mobula.deploy.cli", "train", *words, *where], check=True)
    return read_run_folder(folder / name)


def _is_done(folder: Path) -> bool:
    summary = read_run_folder(folder).summary if folder.is_dir() else None
    return summary is not None and summary.status == "done"


def _read(path: Path) -> dict[tuple[str, int], Result]:
    rows: Sequence[Mapping[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    found = [Result(**{**row, "overrides": tuple(row["overrides"])}) for row in rows]
    return {(result.recipe, result.seed): result for result in found}


def _write(path: Path, known: Mapping[tuple[str, int], Result]) -> None:
    """The file appears whole: a command that is killed leaves the old one."""
    rows = [asdict(known[key]) for key in sorted(known)]
    write_atomically(path, json.dumps(rows, indent=2) + "\n")


def _compare(folder: Path, known: Mapping[tuple[str, int], Result]) -> None:
    """A comparison page for each `MAX_LINES` recipes, of the runs whose folders are here."""
    folders = {name: [folder / f"{name}-{seed}" for seed in _seeds(known, name)] for name in ALGORITHMS}
    lines = [
        ComparedRuns(name, [read_run_folder(run) for run in runs])
        for name, runs in folders.items()
        if runs and all(map(_is_done, runs))
    ]
    for page, start in enumerate(range(0, len(lines), MAX_LINES), start=1):
        html = render_comparison(lines[start : start + MAX_LINES], by_epoch=False)
        (folder / f"comparison-{page}.html").write_text(html, encoding="utf-8")


def _seeds(known: Mapping[tuple[str, int], Result], name: str) -> list[int]:
    return sorted(seed for recipe, seed in known if recipe == name)


def _markdown(known: Mapping[tuple[str, int], Result]) -> list[str]:
    head = ["| recipe | seeds | before | after | each seed, after | target | met |", "|---|---|---|---|---|---|---|"]
    rows = {name: [known[name, seed] for seed in _seeds(known, name)] for name in ALGORITHMS}
    return [*head, *(_row(name, results) for name, results in rows.items() if results)]


def _row(name: str, results: Sequence[Result]) -> str:
    target, after = TARGETS.get(name, TARGET), [result.after for result in results]
    each = " ".join(f"{value:.3f}" for value in after)
    means = (f"{mean(result.before for result in results):.3f}", f"{mean(after):.3f}")
    cells = [f"`{name}`", len(results), *means, each, target, "yes" if min(after) >= target else "no"]
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    typer.run(main)

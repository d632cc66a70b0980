"""Every recipe on the digits task, several seeds each: held-out accuracy before and after RL as a table.

    python -m benchmarks.recipes --experiment grpo --experiment rloo --seeds 3 --folder runs/recipes [KEY=VALUE]...

Each run is one `mobula train` in a process of its own. A run that is done is not repeated, so that the command goes on
where it was stopped. The table goes to the console and to `table.md`, the comparison page to `comparison.html`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from cluster.metrics.report.comparison import Line, Row, render_comparison, table
from cluster.metrics.report.run_folder import RunFolder, read_run_folder
from cluster.metrics.step_records import HELD_OUT

EXPERIMENTS = ("grpo", "rloo", "reinforce_pp", "cpgd", "dapo", "gspo", "gmpo", "cispo", "dr_grpo", "ppo_gae", "distill")
TARGETS = {"ppo_gae": 0.80}  # held-out accuracy after RL; of the others TARGET
TARGET = 0.85
TEACHER = "teacher"  # the run whose policy `distill` learns from
LINES_A_PAGE = 6


def main(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="For every run.")] = None,
    experiment: Annotated[list[str] | None, typer.Option(help="A recipe; all of them if left out.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each recipe: seeds 0, 1, ...")] = 3,
    folder: Annotated[Path, typer.Option(help="Where the runs go.")] = Path("runs/recipes"),
) -> None:
    """Train each recipe with each seed, then write the table."""
    experiments = experiment or EXPERIMENTS
    lines = []
    for name in experiments:
        teacher = _teacher(name, folder, overrides or [])
        runs = [
            _run(folder, f"{name}-{seed}", [f"experiment={name}", f"seed={seed}", *teacher, *(overrides or [])])
            for seed in range(seeds)
        ]
        lines.append(Line(name, runs))
    text = "\n".join(_markdown(lines))
    (folder / "table.md").write_text(text + "\n", encoding="utf-8")
    for page, start in enumerate(range(0, len(lines), LINES_A_PAGE), start=1):
        html = render_comparison(lines[start : start + LINES_A_PAGE], by_epoch=False)
        (folder / f"comparison-{page}.html").write_text(html, encoding="utf-8")
    print(text)


def _teacher(experiment: str, folder: Path, overrides: Sequence[str]) -> list[str]:
    """What `distill` needs beside its seed: a checkpoint that was trained on the rewards."""
    if experiment != "distill":
        return []
    _run(folder, TEACHER, ["experiment=digits", *overrides])
    return [f"algorithm.distillation.teacher={folder / TEACHER / 'policy'}"]


def _run(folder: Path, name: str, words: Sequence[str]) -> RunFolder:
    """The run of this name, trained unless it is done.

    Raises:
        subprocess.CalledProcessError: it failed; its output is on the console.
    """
    if not (folder / name / "summary.json").exists() or _found(folder / name).summary.status != "done":
        where = [f"folder={folder}", f"name={name}", "resume=auto", "metrics.progress=false"]
        subprocess.run([sys.executable, "-m", "deploy.cli", "train", *words, *where], check=True)
    return _found(folder / name)


def _found(folder: Path) -> RunFolder:
    run = read_run_folder(folder)
    assert run.summary is not None, f"{folder} has no summary"
    return run


def _markdown(lines: Sequence[Line]) -> list[str]:
    rows = {row.label: row for row in table(lines) if row.suite == HELD_OUT}
    head = ["| recipe | seeds | before | after | each seed, after | target | met |", "|---|---|---|---|---|---|---|"]
    return [*head, *(_row(rows[line.label], line) for line in lines)]


def _row(row: Row, line: Line) -> str:
    target = TARGETS.get(row.label, TARGET)
    each = [run.evaluations[-1].accuracy for run in line.runs]
    cells = [row.label, row.num_runs, row.before, row.after, " ".join(f"{value:.3f}" for value in each), target]
    return f"| {' | '.join(map(str, cells))} | {'yes' if min(each) >= target else 'no'} |"


if __name__ == "__main__":
    typer.run(main)

"""A released model in the main job, several seeds: accuracy, memory by role over the plan, seconds a phase, gaps.

    python -m benchmarks.pretrained [--seeds 3] [--folder runs/pretrained] [KEY=VALUE]...

The words go to `mobula train experiment=sums resources=laptop_in_turns learner=single`; `experiment=smolvlm_digits`
takes the place of the sums. The table goes to the console and to `table.md` in the folder.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.planner import estimates, watched
from mobula.cluster.metrics.report.run_folder import RunFolder, read_run_folder
from mobula.cluster.runtime.ray_actors import LOGS_FOLDER
from mobula.configs.load import load_config
from mobula.configs.overrides import overridden

WORDS = ("experiment=sums", "resources=laptop_in_turns", "learner=single", "metrics.progress=false")
GIB = 2**30


@dataclass(frozen=True)
class Measured:
    """One run that is done, and the most bytes of each of its roles, measured and estimated."""

    seed: int
    run: RunFolder
    memory: Mapping[str, tuple[int, int]]


def main(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="For every run.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs: seeds 0, 1, ...")] = 3,
    folder: Annotated[Path, typer.Option(help="Where the runs go; they must not be there.")] = Path("runs/pretrained"),
) -> None:
    """Train with each seed, and write the table."""
    words = overridden(WORDS, overrides or [])
    text = "\n".join(table([_measured(words, seed, folder) for seed in range(seeds)]))
    (folder / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)


def _measured(words: Sequence[str], seed: int, folder: Path) -> Measured:
    """Trains with one seed in a separate process.

    Raises:
        subprocess.CalledProcessError: the run failed; its output is on the console.
    """
    words = overridden(words, [f"seed={seed}", f"name=seed-{seed}", f"folder={folder}"])
    config = load_config(words)
    with watched(config.run_folder / LOGS_FOLDER) as peaks:
        subprocess.run([sys.executable, "-m", "mobula.deploy.cli", "train", *words], check=True)
    most = {
        role: (max(n for worker, n in peaks.items() if worker.startswith(f"{role}/")), estimated)
        for role, estimated in estimates(config).items()
    }
    return Measured(seed, read_run_folder(config.run_folder), most)


def table(measured: Sequence[Measured]) -> list[str]:
    """Markdown: one row a seed, then one row a step of each seed."""
    roles = list(measured[0].memory)
    heads = ["seed", "before", "after", "wall time", *(f"{role}, GiB (plan)" for role in roles), "seconds of a step"]
    lines = _rows(heads, [_run_cells(found) for found in measured])
    steps = [[str(found.seed), *cells] for found in measured for cells in _step_cells(found.run)]
    return [*lines, "", *_rows(["seed", "step", "reward", "gap, mean", "gap, largest"], steps)]


def _run_cells(found: Measured) -> list[str]:
    summary = found.run.summary
    assert summary is not None and summary.accuracy_before is not None and summary.accuracy_after is not None
    sizes = [f"{most / GIB:.2f} ({estimated / GIB:.2f})" for most, estimated in found.memory.values()]
    phases = [step.phases for step in found.run.steps]
    means = {name: sum(step.get(name, 0.0) for step in phases) / len(phases) for name in phases[-1]}
    seconds = ", ".join(f"{name} {s:.1f}" for name, s in means.items() if s >= 0.05)
    before, after = summary.accuracy_before, summary.accuracy_after
    return [str(found.seed), f"{before:.2f}", f"{after:.2f}", f"{summary.wall_s:.0f} s", *sizes, seconds]


def _step_cells(run: RunFolder) -> list[list[str]]:
    names = ("logprob_gap_mean", "logprob_gap_max")
    return [
        [str(step.step), f"{step.values['reward_mean']:.2f}"]
        + [f"{step.values[name]:.1e}" if name in step.values else "-" for name in names]
        for step in run.steps
    ]


def _rows(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]


if __name__ == "__main__":
    typer.run(main)

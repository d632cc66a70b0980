"""Commands on data and records: `mobula data`, replay and score."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from mobula.cluster.errors import PreflightError
from mobula.deploy.cli.errors import explained
from mobula.deploy.cli.options import Overrides, takes
from mobula.deploy.data.options import ScoreCommand
from mobula.deploy.host.terminal import terminal

data = typer.Typer(help="Look at a data set, or write it in another form.", no_args_is_help=True)

DataWords = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="As for train, e.g. data=verl data.path=FOLDER."),
]


@data.command()
def inspect(
    overrides: DataWords = None,
    split: Annotated[str, typer.Option(help="The split to look at.")] = "train",
    output: Annotated[Path, typer.Option(help="The page to write.")] = Path("data.html"),
    samples: Annotated[int, typer.Option(min=0, help="Samples that are shown.")] = 24,
) -> None:
    """Write a page of samples, lengths, labels, and what is skipped and why; with policy.model=, lengths are tokens."""
    from mobula.configs.load import load_config

    with explained():
        config = load_config(overrides or [], is_complete=False)
        from mobula.deploy.data import inspect as inspecting

        raise typer.Exit(inspecting.inspect(config, split, output, samples, terminal()))


@data.command()
def convert(
    output: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder to write; it must not hold anything.")],
    overrides: DataWords = None,
    split: Annotated[list[str] | None, typer.Option(help="A split to write, again for more; else all three.")] = None,
) -> None:
    """Write the rows of a data set as messages in JSONL, as offline jobs read them, with their media in files."""
    from mobula.configs.load import load_config

    with explained():
        config = load_config(overrides or [], is_complete=False)
        from mobula.deploy.data import convert as converting

        splits = split or ["train", "validation", "test"]
        converting.convert(config, output, splits, terminal())


def replay(
    run_folder: Annotated[Path, typer.Argument(help="The folder of a run that had replay.trajectory_log=true.")],
    overrides: Overrides = None,
) -> None:
    """Train a learner on a run's recorded steps, without rollouts; overrides change single keys."""
    from mobula.cluster.metrics.report.run_folder import CONFIG_FILE
    from mobula.configs.load import load_resolved

    with explained():
        config = load_resolved(run_folder / CONFIG_FILE, overrides or [])
        from mobula.deploy.data.replay import replay as train_again

        raise typer.Exit(train_again(run_folder, config))


@takes(ScoreCommand)
def score(command: ScoreCommand) -> None:
    """Score recorded responses by the rewards of a run: averages, pass rate, best and worst."""
    with explained():
        from mobula.deploy.data.score import score as run_score

        if not math.isfinite(command.pass_threshold):
            raise PreflightError(f"--pass-threshold {command.pass_threshold}: give a finite number")
        raise typer.Exit(run_score(command, terminal()))

"""`mobula data`: look at a data set, and write it in another form."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mobula.deploy.cli.errors import explained
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

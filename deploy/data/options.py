"""The options of `mobula score`, in a module that `--help` imports in no time."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True, kw_only=True)
class ScoreCommand:
    """The options of `mobula score`; files whose path is None are not written."""

    source: Annotated[Path, typer.Argument(metavar="FILE|RUN", help="JSONL, Parquet, or a run with trajectories.")]
    overrides: Annotated[
        list[str],
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Groups and keys in any order, e.g. experiment=sums resources=laptop algorithm.kl.coef=0.01",
        ),
    ] = field(default_factory=list)
    recipe: Annotated[Path | None, typer.Option(help="Score by a YAML file like a run's `rewards`.")] = None
    pass_threshold: Annotated[float, typer.Option(help="Reward from which a response passes.")] = 0.5
    top_k: Annotated[int, typer.Option(min=0, help="Best and worst records that are shown.")] = 3
    max_ids: Annotated[int, typer.Option(min=0, help="Right records below the threshold that are named.")] = 1000
    output: Annotated[Path | None, typer.Option(help="Write the summary as JSON.")] = None
    results: Annotated[Path | None, typer.Option(help="Write each record's scores as JSONL.")] = None
    num_processes: Annotated[int, typer.Option("--processes", min=1, help="Processes that score.")] = len(
        os.sched_getaffinity(0)
    )
    timeout_s: Annotated[float, typer.Option("--timeout", min=1, help="Seconds that a batch of rows may take.")] = 600.0
    is_strict: Annotated[bool, typer.Option("--strict", help="Refuse a file with a broken row.")] = False
    is_quiet: Annotated[bool, typer.Option("--quiet", help="Print one line.")] = False

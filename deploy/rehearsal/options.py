"""The options of `mobula rehearse`, in a module that `--help` imports in no time."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True, kw_only=True)
class RehearseCommand:
    overrides: Annotated[
        list[str],
        typer.Argument(
            metavar="[RUN] [KEY=VALUE]...",
            help="A run, to which the speeds are fitted unless others are given, or words as "
            "experiment=own resources=multi_node",
        ),
    ] = field(default_factory=list)
    run: Annotated[Path | None, typer.Option("--run", metavar="RUN", help="The same by an option.")] = None
    nodes: Annotated[
        str | None, typer.Option(metavar="NxGxMEMORY", help="The nodes, e.g. 8x8x80GB; else as many as needed.")
    ] = None
    cluster: Annotated[Path | None, typer.Option(metavar="FILE", help="The nodes, from a YAML file.")] = None
    model: Annotated[
        str | None,
        typer.Option(help="A model of docs/scaling.md by its name there, for sizes, in place of policy.model."),
    ] = None
    gpu: Annotated[str | None, typer.Option(help="The GPU for estimated speeds: A100, H100, H200, ...")] = None
    measured: Annotated[
        list[Path], typer.Option(metavar="RUN", help="Fit the speeds to this run; give it several times.")
    ] = field(default_factory=list)
    speeds: Annotated[Path | None, typer.Option(metavar="FILE", help="A YAML file of speeds.")] = None
    words: Annotated[list[str], typer.Option("--speed", metavar="KEY=NUMBER", help="One speed, stated.")] = field(
        default_factory=list
    )
    lengths_of: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Response lengths from a run's trajectory log.")
    ] = None
    mean_tokens: Annotated[float | None, typer.Option(min=1, help="Mean length of responses, before the cut.")] = None
    sigma: Annotated[float, typer.Option(min=0, help="Spread of the logarithm of lengths; 0: equal ones.")] = 0.8
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Prompts of so many tokens, in place of the data.")
    ] = None
    media_tokens: Annotated[int, typer.Option(min=0, help="Of them, tokens of one image.")] = 0
    media_bytes: Annotated[int, typer.Option(min=0, help="Bytes of its tensors.")] = 0
    faults: Annotated[
        list[str], typer.Option("--fault", metavar="KIND[:NODE]@STEP", help="A fault, as node_loss:node-1@3.")
    ] = field(default_factory=list)
    fault_file: Annotated[Path | None, typer.Option("--faults", metavar="FILE", help="A YAML list of faults.")] = None
    num_steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to play.")] = 12
    factors: Annotated[
        list[int],
        typer.Option("--size", min=1, metavar="FACTOR", help="Also play so many times the nodes and prompts."),
    ] = field(default_factory=list)
    size_s: Annotated[
        float, typer.Option("--size-seconds", min=1, help="Seconds here for each size; the sweep ends there.")
    ] = 120.0
    with_gains: Annotated[bool, typer.Option("--gains/--no-gains", help="Also play each role at twice its speed.")] = (
        True
    )
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the page as JSON, too.")] = (
        None
    )

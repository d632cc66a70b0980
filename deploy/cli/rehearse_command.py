"""The command `mobula rehearse`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mobula.deploy.cli.errors import explained
from mobula.deploy.host.terminal import terminal

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="The words of the run, e.g. experiment=own resources=multi_node"),
]


def rehearse(
    overrides: Words = None,
    nodes: Annotated[
        str | None, typer.Option(metavar="NxGxMEMORY", help="The nodes, e.g. 8x8x80GB; else as many as needed.")
    ] = None,
    cluster: Annotated[Path | None, typer.Option(metavar="FILE", help="The nodes, from a YAML file.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A model of docs/scaling.md by its name there, for sizes, in place of policy.model."),
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="The GPU for estimated speeds: A100, H100, H200, ...")] = None,
    measured: Annotated[
        list[Path] | None, typer.Option(metavar="RUN", help="Fit the speeds to this run; give it several times.")
    ] = None,
    speeds: Annotated[Path | None, typer.Option(metavar="FILE", help="A YAML file of speeds.")] = None,
    speed: Annotated[list[str] | None, typer.Option(metavar="KEY=NUMBER", help="One speed, stated.")] = None,
    lengths_of: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Response lengths from a run's trajectory log.")
    ] = None,
    mean_tokens: Annotated[float | None, typer.Option(min=1, help="Mean length of responses, before the cut.")] = None,
    sigma: Annotated[float, typer.Option(min=0, help="Spread of the logarithm of lengths; 0: equal ones.")] = 0.8,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Prompts of so many tokens, in place of the data.")
    ] = None,
    media_tokens: Annotated[int, typer.Option(min=0, help="Of them, tokens of one image.")] = 0,
    media_bytes: Annotated[int, typer.Option(min=0, help="Bytes of its tensors.")] = 0,
    fault: Annotated[
        list[str] | None, typer.Option(metavar="KIND[:NODE]@STEP", help="A fault, as node_loss:node-1@3.")
    ] = None,
    faults: Annotated[Path | None, typer.Option(metavar="FILE", help="A YAML list of faults.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to play.")] = 12,
    size: Annotated[
        list[int] | None, typer.Option(min=1, metavar="FACTOR", help="Also play so many times the nodes and prompts.")
    ] = None,
    size_seconds: Annotated[
        float, typer.Option(min=1, help="Seconds here for each size; the sweep ends there.")
    ] = 120.0,
    gains: Annotated[bool, typer.Option(help="Also play each role at twice its speed.")] = True,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the page as JSON, too.")] = None,
) -> None:
    """Play a cluster run on this machine: real driver code, simulated engines and learner ranks, virtual time."""
    with explained():
        from mobula.deploy.rehearsal.command import RehearseCommand
        from mobula.deploy.rehearsal.command import rehearse as play

        command = RehearseCommand(
            overrides=overrides or [],
            nodes=nodes,
            cluster=cluster,
            model=model,
            gpu=gpu,
            measured=measured or [],
            speeds=speeds,
            words=speed or [],
            lengths_of=lengths_of,
            mean_tokens=mean_tokens,
            sigma=sigma,
            prompt_tokens=prompt_tokens,
            media_tokens=media_tokens,
            media_bytes=media_bytes,
            faults=fault or [],
            fault_file=faults,
            num_steps=steps,
            factors=size or [],
            size_s=size_seconds,
            with_gains=gains,
            json_file=json,
        )
        play(command, terminal(soft_wrap=False))

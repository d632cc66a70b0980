"""The command `mobula audit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mobula.deploy.cli.errors import explained
from mobula.deploy.host.terminal import terminal


def audit(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="The run; the latest one if left out.")] = None,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="FOLDER", help="The run's folder, where it is not runs/NAME.")
    ] = None,
    head: Annotated[
        str,
        typer.Option(metavar="SHA256", help="A digest noted earlier, e.g. from run.log, that must be in the chain."),
    ] = "",
    key_env: Annotated[
        str, typer.Option("--key-env", metavar="VARIABLE", help="The environment variable with the key of the run.")
    ] = "",
    weights: Annotated[
        bool, typer.Option("--weights", help="Compare checkpoints with the checksums of the pushed weights, too.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare a run's files with its chain of records: tokens too old, groups lost or trained twice, files altered or
    added. Exits with 1 on a finding. The last lines say what is proven and what is not.
    """
    with explained():
        from mobula.deploy.report.audit import AuditOptions
        from mobula.deploy.report.audit import audit as run_audit

        options = AuditOptions(head, key_env, weights, json)
        raise typer.Exit(run_audit(name, run, options, terminal(soft_wrap=True)))

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
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Prove from a run's files that nothing was stale, lost, trained twice or altered; exits with 1 on a finding."""
    with explained():
        from mobula.deploy.tools.audit import audit as run_audit

        raise typer.Exit(run_audit(name, run, head, json, terminal(soft_wrap=True)))

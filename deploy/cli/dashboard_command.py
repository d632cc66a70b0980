"""`mobula dashboard`: the panels of the Grafana dashboards as a local page."""

from __future__ import annotations

from typing import Annotated

import typer

from deploy.cli.errors import explained
from deploy.host.terminal import terminal


def dashboard(
    prometheus: Annotated[
        str, typer.Option(metavar="URL", help="The Prometheus that scrapes Ray's metrics.")
    ] = "http://127.0.0.1:9090",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one and says which.")] = 0,
) -> None:
    """Show the dashboards' panels as a local page, from a Prometheus, until stopped."""
    console = terminal(soft_wrap=True)
    with explained():
        from deploy.dashboard.server import serve

        serve(prometheus, port, lambda text: console.print(f"dashboard: {text}", markup=False, highlight=False))

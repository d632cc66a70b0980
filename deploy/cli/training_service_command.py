"""`mobula serve-training`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from mobula.cluster.errors import PreflightError
from mobula.deploy.cli.environment_commands import AllowHost, Host, Port, announcing
from mobula.deploy.cli.errors import explained

SERVED = "sampler.adapters.max_served=16"  # if the user has set nothing


def serve_training(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Groups and keys, e.g. policy.model=FOLDER sampler=vllm"),
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 0,
    allow_host: AllowHost = None,
    tenants: Annotated[
        Path | None, typer.Option(help="YAML file of `tenant: token` lines; without it every request is admitted.")
    ] = None,
    folder: Annotated[
        Path, typer.Option(help="Requests, snapshots and checkpoints. A restart with the same folder continues.")
    ] = Path("training_service"),
    model_name: Annotated[
        str | None, typer.Option(help="A further name of the base model for clients, e.g. its hub name.")
    ] = None,
) -> None:
    """Serve training and sampling of many LoRA adapters to programs that use the `tinker` client."""
    with explained("the server has stopped"):
        if find_spec("tinker") is None:
            raise PreflightError("the training service needs the package tinker: pip install 'mobula[tinker]'")
        from mobula.cluster.serving import Address
        from mobula.configs.load import load_config
        from mobula.configs.overrides import overridden
        from mobula.deploy.training_service import serving
        from mobula.deploy.training_service.tenants import read_tenants

        config = load_config(overrides or [], is_complete=False)
        if config.training_service.weights == "adapters":
            config = load_config(overridden([SERVED], overrides or []), is_complete=False)
        address = Address(host, port, None, tuple(allow_host or ()))
        options = serving.ServeTrainingOptions(address, read_tenants(tenants), folder, model_name)
        serving.serve(config, options, announcing("training service"))

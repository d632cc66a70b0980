"""`mobula serve-environment`."""

from __future__ import annotations

import math
from collections.abc import Callable

from mobula.actors.environments.registry import build_environment
from mobula.actors.environments.server import EnvironmentServer, make_app
from mobula.cluster.errors import PreflightError
from mobula.cluster.serving import Address, RequestGate, run_server
from mobula.configs.schema.data import EnvironmentConfig

MAX_REQUEST_BYTES = 16 << 20  # one action of a policy


def serve(config: EnvironmentConfig, address: Address, idle_s: float, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT. `announce` receives the URL."""
    if not config.is_on or config.host == "remote":
        raise PreflightError(
            f"environment.name={config.name}, environment.host={config.host} is nothing to serve: give "
            "environment=NAME and environment.host=process, inline or ray"
        )
    try:
        build_environment(config.name, config.options).close()
    except ValueError as error:
        raise PreflightError(str(error)) from error
    listener = address.listen()
    server = EnvironmentServer(config, idle_s=idle_s)
    app = RequestGate(make_app(server), address, MAX_REQUEST_BYTES, config.step_timeout_s)
    grace_s = math.ceil(max(config.step_timeout_s, config.reset_timeout_s))
    run_server(app, listener, grace_s=grace_s, announce=announce)

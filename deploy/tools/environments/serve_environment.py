"""`mobula serve-environment`: the configured environment behind HTTP, until the process receives SIGTERM or SIGINT."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from mobula.actors.environments.registry import build_environment
from mobula.actors.environments.server import EnvironmentServer, make_app
from mobula.cluster.errors import PreflightError
from mobula.cluster.serving import Address, Bearer, Gate, run_server
from mobula.configs.schema.environment import EnvironmentConfig

MAX_REQUEST_BYTES = 16 << 20  # one action of a policy


@dataclass(frozen=True)
class ServeEnvironmentOptions:
    """The options of `serve-environment`."""

    address: Address
    idle_s: float


def serve(config: EnvironmentConfig, options: ServeEnvironmentOptions, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT. `announce` receives the URL.

    Raises:
        PreflightError: there is no environment to serve, it cannot be made, or the address is unfit.
    """
    if not config.is_on or config.host == "remote":
        raise PreflightError(
            f"environment.name={config.name}, environment.host={config.host} is nothing to serve: give "
            "environment=NAME and environment.host=process, inline or ray"
        )
    try:
        build_environment(config.name, config.options).close()
    except ValueError as error:
        raise PreflightError(str(error)) from error
    listener = options.address.listen()
    server = EnvironmentServer(config, idle_s=options.idle_s)
    admission, hosts = Bearer(options.address.token), options.address.hosts
    app = Gate(make_app(server), admission, MAX_REQUEST_BYTES, config.step_timeout_s, hosts)
    grace_s = math.ceil(max(config.step_timeout_s, config.reset_timeout_s))
    run_server(app, listener, grace_s=grace_s, announce=announce)

"""`mobula serve-environment`: the configured environment behind HTTP, until the process receives SIGTERM or SIGINT."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from dataclasses import dataclass

import uvicorn

from mobula.actors.environments.registry import build_environment
from mobula.actors.environments.server import RETRY_AFTER_S, EnvironmentServer, make_app
from mobula.cluster.errors import PreflightError
from mobula.configs.schema.environment import EnvironmentConfig
from mobula.deploy.tools.serve_rewards import is_loopback, listen
from mobula.rewards.http.request_gate import RequestGate

MAX_REQUEST_BYTES = 16 << 20  # one action of a policy


@dataclass(frozen=True)
class ServeEnvironmentOptions:
    """The options of `serve-environment`."""

    host: str
    port: int
    token: str | None
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
    if options.token is None and not is_loopback(options.host):
        raise PreflightError(
            f"--host {options.host} is reached from other machines, and there is no token: give --token-env or "
            "--token-file, or listen on 127.0.0.1"
        )
    try:
        build_environment(config.name, config.options).close()
    except ValueError as error:
        raise PreflightError(str(error)) from error
    listener = listen(options.host, options.port)
    server = EnvironmentServer(config, idle_s=options.idle_s)
    app = RequestGate(
        make_app(server),
        token=options.token,
        max_request_bytes=MAX_REQUEST_BYTES,
        read_s=config.step_timeout_s,
        is_full=lambda: False,  # only new sessions are refused
        retry_after_s=RETRY_AFTER_S,
        on_status=lambda status: None,
    )
    grace_s = math.ceil(max(config.step_timeout_s, config.reset_timeout_s))
    running = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=grace_s))
    for number in (signal.SIGTERM, signal.SIGINT):  # the server raises what stopped it again once it is done
        signal.signal(number, lambda *_: None)
    host = f"[{options.host}]" if ":" in options.host else options.host
    announce(f"http://{host}:{listener.getsockname()[1]}")
    running.run(sockets=[listener])

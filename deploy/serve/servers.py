"""`mobula serve-rewards` and `mobula serve-environment`."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from mobula.cluster.errors import PreflightError
from mobula.cluster.serving import Address, RequestGate, run_server
from mobula.configs.errors import ConfigError
from mobula.configs.load import load_rewards
from mobula.configs.schema.data import EnvironmentConfig
from mobula.deploy.preflight.findings import refusing
from mobula.rewards.http.server import RewardScorer, RewardServer, ScorerThreads
from mobula.rewards.http.server import make_app as rewards_app

MAX_REQUEST_BYTES = 16 << 20  # one action of a policy


def serve_rewards(
    path: Path,
    address: Address,
    announce: Callable[[str], None],
    *,
    threads: int,
    max_waiting: int,
    timeout_s: float,
    max_request_bytes: int,
    device: str,
    dtype: str,
) -> None:
    """Serve until SIGTERM or SIGINT; what is in flight then is finished first. `announce` receives the URL."""
    listener = address.listen()
    rewards = load_rewards(path)
    try:
        scorers = [RewardScorer(rewards, timeout_s, device, dtype) for _ in range(threads)]
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    server = RewardServer(ScorerThreads(scorers, max_waiting=max_waiting), timeout_s, max_request_bytes)
    run_server(rewards_app(server, address), listener, grace_s=math.ceil(2 * timeout_s), announce=announce)


def serve_environment(
    config: EnvironmentConfig, address: Address, idle_s: float, announce: Callable[[str], None]
) -> None:
    """Serve until SIGTERM or SIGINT. `announce` receives the URL."""
    # Here, because they load Ray, which a server of rewards has no use for.
    from mobula.actors.environments.registry import build_environment
    from mobula.actors.environments.server import EnvironmentServer, make_app

    if not config.is_on or config.host == "remote":
        raise PreflightError(
            f"environment.name={config.name}, environment.host={config.host} is nothing to serve: give "
            "environment=NAME and environment.host=process, inline or ray"
        )
    with refusing():
        build_environment(config.name, config.options).close()
    listener = address.listen()
    gate = RequestGate(
        make_app(EnvironmentServer(config, idle_s=idle_s)), address, MAX_REQUEST_BYTES, config.step_timeout_s
    )
    grace_s = math.ceil(max(config.step_timeout_s, config.reset_timeout_s))
    run_server(gate, listener, grace_s=grace_s, announce=announce)

"""`mobula serve-rewards`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mobula.cluster.serving import Address, run_server
from mobula.configs.errors import ConfigError
from mobula.configs.load import load_rewards
from mobula.rewards.http.server import RewardScorer, RewardServer, ScorerThreads, make_app


@dataclass(frozen=True)
class ServeRewardsOptions:
    address: Address
    threads: int
    max_waiting: int
    timeout_s: float
    max_request_bytes: int
    device: str
    dtype: str


def serve(path: Path, options: ServeRewardsOptions, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; what is in flight then is finished first. `announce` receives the URL."""
    listener = options.address.listen()
    rewards = load_rewards(path)
    try:
        scorers = [
            RewardScorer(rewards, options.timeout_s, options.device, options.dtype) for _ in range(options.threads)
        ]
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    threads = ScorerThreads(scorers, max_waiting=options.max_waiting)
    server = RewardServer(threads, options.timeout_s, options.max_request_bytes)
    run_server(make_app(server, options.address), listener, grace_s=math.ceil(2 * options.timeout_s), announce=announce)

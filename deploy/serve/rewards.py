"""`mobula serve-rewards`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mobula.cluster.errors import StuckError
from mobula.cluster.records.trajectory import Reward
from mobula.cluster.serving import Address, run_server
from mobula.configs.errors import ConfigError
from mobula.configs.load import load_rewards
from mobula.configs.schema.rewards import RewardsConfig
from mobula.rewards.components import ComponentError, RewardScoring
from mobula.rewards.contract import FailureKind, Outcome, RewardRequest, Score, ScoringFailure
from mobula.rewards.http.server import RewardServer, ScorerThreads, make_app
from mobula.rewards.isolation.process import InTime, IsolatedPool, Tools

FUNCTION_SHARE = 4  # one answer that hangs may take this part of a request's time, as in a run
MAX_STUCK = 8  # hanging computations after which a scorer refuses requests: each blocks a thread and holds its memory
START_TIMEOUT_S = 120.0  # to import what a reward function needs; a request's own deadline comes first


@dataclass(frozen=True)
class ServeRewardsOptions:
    address: Address
    threads: int
    max_waiting: int
    timeout_s: float
    max_request_bytes: int
    device: str
    dtype: str


class RewardScorer:
    """Implements `BatchScorer` with separate functions; the breakdown of a score has the components' values.

    A model or engine that hangs is abandoned in its thread, and scoring continues, up to MAX_STUCK times.
    """

    def __init__(self, rewards: RewardsConfig, options: ServeRewardsOptions) -> None:
        function_s = options.timeout_s / FUNCTION_SHARE
        self._isolated = IsolatedPool(
            num_processes=rewards.processes, timeout_s=function_s, start_timeout_s=START_TIMEOUT_S
        )
        self._in_time = InTime(timeout_s=function_s)
        tools = Tools(self._isolated, options.device, options.dtype, self._in_time)
        self._scoring = RewardScoring(rewards, None, tools)
        self.is_stuck = False

    def score(self, requests: Sequence[RewardRequest], deadline: float) -> list[Outcome]:
        self.is_stuck = self._in_time.num_stuck >= MAX_STUCK
        if self.is_stuck:
            reason = f"{MAX_STUCK} computations hang since earlier requests: restart the server"
            return [ScoringFailure(FailureKind.TIMED_OUT, reason)] * len(requests)
        self._isolated.deadline = self._in_time.deadline = deadline
        try:
            return [_outcome(reward) for reward in self._scoring.rewards(requests)]
        except StuckError as error:
            self.is_stuck = True
            return [ScoringFailure(FailureKind.FAILED, f"{error}: restart the server")] * len(requests)

    def close(self) -> None:
        self._isolated.close()


def serve(path: Path, options: ServeRewardsOptions, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; what is in flight then is finished first. `announce` receives the URL."""
    listener = options.address.listen()
    rewards = load_rewards(path)
    try:
        scorers = [RewardScorer(rewards, options) for _ in range(options.threads)]
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    threads = ScorerThreads(scorers, max_waiting=options.max_waiting)
    server = RewardServer(threads, options.timeout_s, options.max_request_bytes)
    run_server(make_app(server, options.address), listener, grace_s=math.ceil(2 * options.timeout_s), announce=announce)


def _outcome(reward: Reward | ComponentError) -> Outcome:
    if isinstance(reward, ComponentError):
        return ScoringFailure(reward.kind, str(reward))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in reward.reasons.items())
    return Score(reward.value, reasons, reward.components)

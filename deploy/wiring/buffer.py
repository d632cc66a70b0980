"""The replay buffer of a run: how it is started, again if need be, and with which deadlines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from cluster.replay.buffer import ReplayBuffer
from cluster.replay.client import ReplayClient, ReplayDeadlines
from cluster.replay.restartable_replay import RestartableReplay
from cluster.runtime.placement import PlacedWorker
from cluster.workers.restart_policy import RestartBudget
from configs.schema import RunConfig
from deploy.wiring.persistence import build_journal_writer
from deploy.wiring.scaling import RoleHosts
from deploy.wiring.scoring_roles import restart_policy
from deploy.wiring.spawner import Spawner

REPLAY_CALLS = 64  # beside the groups that wait for room


def replay_buffer(config: RunConfig, spawner: Spawner, on_lost: Callable[[str], None]) -> RestartableReplay:
    """The replay buffer, whose process builds itself in the background."""
    timeouts = config.timeouts
    deadlines = ReplayDeadlines(
        start_s=timeouts.start_s,
        call_s=timeouts.object_s,
        reserve_s=timeouts.backpressure_s,
        sign_s=config.supervision.sign_timeout_s,
        stop_s=timeouts.stop_s,
    )
    client = partial(ReplayClient, deadlines=deadlines, is_journalled=config.replay.journal)
    start = partial(_start_replay, config, spawner)
    hosts = RoleHosts(spawner, "replay", start, stop_s=timeouts.stop_s)

    async def spawn() -> ReplayClient:
        return client(await hosts.start(0))

    [place] = spawner.workers("replay")
    return RestartableReplay(
        client(start(place)),
        spawn,
        max_bytes=config.replay.max_bytes,
        take_s=_take_deadline(config),
        budget=RestartBudget(restart_policy(config)),
        on_lost=on_lost,
    )


def _start_replay(config: RunConfig, spawner: Spawner, worker: PlacedWorker) -> Any:
    return spawner.start(
        ReplayBuffer,
        worker=worker,
        max_concurrency=config.algorithm.max_concurrent_groups + REPLAY_CALLS,
        journal=build_journal_writer(config),
        max_bytes=config.replay.max_bytes,
        min_ready=config.algorithm.prompts_per_step,
    )


def _take_deadline(config: RunConfig) -> float:
    """The longest that a step's groups may take: every try of the slowest prompt, its waits, and its reward.

    Each chunk of a response puts off a try's deadline, and none is sampled twice.
    """
    timeouts, supervision, sampler = config.timeouts, config.supervision, config.sampler
    one_try = timeouts.rollout_s + supervision.probe_timeout_s + supervision.no_worker_s
    tries = (config.max_rollout_retries + 1) * one_try
    num_chunks = config.algorithm.samples_per_prompt * ((sampler.max_tokens - 1) // sampler.chunk_tokens)
    return tries + num_chunks * timeouts.rollout_s + timeouts.reward_s

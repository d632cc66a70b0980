"""SIGKILL in the middle of a long group: another actor goes on from the last chunk; no more is sampled again."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fakes import make_prompt
from interrupted import token_at
from known_roles import KnownRollout
from small_cluster import start

from mobula.actors.rollout.client import RolloutClient
from mobula.cluster.records.trajectory import EndedResponse, FinishReason
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.rollout.dispatcher import RetryingRollouts
from mobula.cluster.rollout.in_flight import PROMPTS, TOKENS_KEPT, TOKENS_LOST, InFlightRequests
from mobula.cluster.rollout.rollout_pool import HealthChecks, RolloutPool
from mobula.cluster.runtime.object_store import fetch
from mobula.cluster.workers.status import RestartPolicy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CHUNK = 8
LENGTHS = (90, 30, 75)
DIES_AT = 55  # steps; the last chunk before it had left 7 steps before
SETTINGS = SamplingSettings(len(LENGTHS), 0.0, max_tokens=100, seed=0)
PROMPT = make_prompt("0/0/s0")
DEADLINES_S = {"start_s": 90, "rollout_s": 30, "sync_s": 10, "sign_s": 10, "probe_s": 10, "stop_s": 1}


async def test_a_killed_actor_costs_less_than_one_chunk_of_each_response(local_ray: str, tmp_path: Path) -> None:
    ended: list[EndedResponse] = []
    in_flight_requests, retries, handles = InFlightRequests(CHUNK, on_ended=ended.append), Counter[str](), []

    async def spawn(index: int) -> RolloutClient:
        role = (tmp_path, LENGTHS, CHUNK, DIES_AT, 0.03)
        handles.append(start(KnownRollout, f"rollout/{index}", *role, max_concurrency=8, options={}))
        return RolloutClient(handles[-1], f"rollout/{index}", in_flight_requests=in_flight_requests, **DEADLINES_S)

    pool = RolloutPool(
        spawn,
        2,
        release=nothing,
        policy=RestartPolicy(max_restarts=5, window_s=600, backoff_s=60, max_backoff_s=60),
        health=HealthChecks(interval_s=60, probe_interval_s=60, max_failures_in_a_row=3, no_worker_s=90),
        on_lost=lambda kind: None,
    )
    await pool.start()
    rollouts = RetryingRollouts(pool, in_flight_requests, max_retries=1, on_retry=lambda kind: retries.update([kind]))
    reference, summary, _ = await rollouts.generate(PROMPT, SETTINGS)
    await pool.close()

    assert retries == {"WorkerDiedError": 1}
    sampled = [min(DIES_AT, length) for length in LENGTHS]
    assert in_flight_requests.resumed[PROMPTS] == 1
    assert in_flight_requests.resumed[TOKENS_KEPT] >= sum(sampled) - 2 * (CHUNK - 1)
    assert in_flight_requests.resumed[TOKENS_KEPT] / sum(sampled) >= 1 - CHUNK / max(sampled)
    assert in_flight_requests.resumed[TOKENS_LOST] == 2 * (CHUNK - 1)

    [group] = await asyncio.to_thread(fetch, [reference], timeout_s=10, what="the group of an actor that is gone")
    assert group.summary() == summary
    assert [t.num_steps for t in group.trajectories] == list(LENGTHS)
    for index, trajectory in enumerate(group.trajectories):
        ids = [token_at(PROMPT.prompt_id, index, position) for position in range(LENGTHS[index])]
        assert trajectory.actions.token_ids.tolist() == ids
        assert trajectory.behavior_logprobs.tolist() == [-position for position in range(LENGTHS[index])]
        assert trajectory.finish_reason is FinishReason.STOP
    assert in_flight_requests.summary().num_prompts == 0
    [first, *others] = ended  # the shortest one, before the actor was killed; it is not reported again
    assert (first.sibling, first.response) == (1, group.trajectories[1].response)
    assert [(it.sibling, it.response) for it in others] in ([], [(2, group.trajectories[2].response)])


async def nothing(index: int) -> Any: ...

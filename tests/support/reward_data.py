"""Rewards for tests: components with the least that they need, groups of answers, and pools over given workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.trajectory import FinishReason, Prompt, Response, Trajectory, TrajectoryGroup, WeightSpan
from mobula.cluster.workers.status import RestartPolicy
from mobula.cluster.workers.work_queue import Hosts
from mobula.configs.schema import Recipe, RewardComponent, RewardPoolConfig, RewardsConfig
from mobula.rewards.contract import RewardRequest, Score, evaluate
from mobula.rewards.functions import build_function
from mobula.rewards.isolation.process import IsolatedProcess
from mobula.rewards.pool.reward_pool import LossCounter, RewardPool
from mobula.rewards.pool.service import RewardService, ServiceSettings
from mobula.rewards.tools import Tools

TOOLS = Tools(IsolatedProcess(timeout_s=1, start_timeout_s=1), "cpu", "float32")
"""Of functions that start no process."""


def request(text: str, *references: str, prompt: str = "", tokens: int = 1, **metadata: Any) -> RewardRequest:
    return RewardRequest(Response(text, num_tokens=tokens, is_truncated=False), references, metadata, prompt)


def score(name: str, options: Mapping[str, Any], asked: RewardRequest) -> Score:
    """What a built-in function gives."""
    return evaluate(build_function(name, dict(options), TOOLS), asked)


def component(name: str, function: str, weight: float = 1.0, /, **options: Any) -> RewardComponent:
    return component_of(name, function, weight=weight, options=options)


def component_of(name: str, function: str, **changes: Any) -> RewardComponent:
    least = {"weight": 1.0, "options": {}, "service": "reward"}
    least |= {"needs_images": False, "retries": 0, "cache_entries": 0}
    return RewardComponent(name=name, function=function, **{**least, **changes})


def rewards_of(
    *components: RewardComponent, recipes: Mapping[str, Recipe] | None = None, **changes: Any
) -> RewardsConfig:
    least = {
        "label_key": "label",
        "accuracy_component": components[0].name if components else "",
        "on_failure": "exclude",
        "processes": 1,
        "pool": RewardPoolConfig(max_batch_groups=1, batches_in_flight=1, max_queued_groups=64),
    }
    return RewardsConfig(components=components, recipes=dict(recipes or {}), **{**least, **changes})


def pool_over(
    rewards: RewardsConfig, workers: Sequence[Any], *, hosts: Hosts, restarts: RestartPolicy, **settings: Any
) -> RewardPool:
    """A pool whose one service, `reward`, has these workers; `settings` are those of `ServiceSettings`."""
    least = {"start_s": 5.0, "alive_s": 5.0, "timeout_s": 5.0, "max_batch": 1, "max_in_flight": 1, "max_queued": 64}
    losses = LossCounter()
    chosen = ServiceSettings(**{**least, "max_attempts": 3, **settings})
    service = RewardService(
        "reward", workers, hosts=hosts, restarts=restarts, settings=chosen, on_lost=losses.count_loss
    )
    return RewardPool(rewards, {"reward": service}, losses)


def answers(prompt_id: str, *texts: str, references: tuple[str, ...] = ()) -> TrajectoryGroup:
    """A group whose responses are `texts`; nothing else of it matters to rewards."""
    ids = np.zeros(1, np.int32)
    prompt = Prompt(prompt_id, prompt_id.rpartition("/")[2], "?", ids, ids, references=references)
    return TrajectoryGroup(prompt, tuple(_answer(f"{prompt_id}#{i}", text) for i, text in enumerate(texts)))


def _answer(trajectory_id: str, text: str) -> Trajectory:
    return Trajectory(
        trajectory_id=trajectory_id,
        actions=TokenActions(np.zeros(1, np.int32)),
        behavior_logprobs=np.zeros(1, np.float32),
        action_mask=np.ones(1, bool),
        weight_spans=(WeightSpan(0, 0, 1),),
        finish_reason=FinishReason.STOP,
        response=Response(text, num_tokens=1, is_truncated=False),
    )

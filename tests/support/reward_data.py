"""Rewards for tests: components with the least that they need, groups of answers, pools, and records."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from fakes import make_trajectory

from mobula.cluster.records.trajectory import Prompt, Response, TrajectoryGroup
from mobula.cluster.workers.status import RestartPolicy
from mobula.cluster.workers.work_queue import Hosts
from mobula.configs.load import load_config
from mobula.configs.schema import Recipe, RewardComponent, RewardPoolConfig, RewardsConfig
from mobula.rewards.contract import FailureKind, Outcome, RewardRequest, Score, evaluate
from mobula.rewards.functions import build_function
from mobula.rewards.isolation.process import IsolatedProcess
from mobula.rewards.offline.rows import open_source
from mobula.rewards.offline.scorer import ScoringOptions, score_source
from mobula.rewards.pool.reward_pool import LossCounter, RewardPool, RewardService, ServiceSettings
from mobula.rewards.pool.worker import RewardWorker
from mobula.rewards.tools import Tools

TOOLS = Tools(IsolatedProcess(timeout_s=10, start_timeout_s=120), "cpu", "float32")
"""Their process starts with the first function that needs one."""


def request(text: str, *references: str, prompt: str = "", tokens: int = 1, **metadata: Any) -> RewardRequest:
    return RewardRequest(Response(text, num_tokens=tokens, is_truncated=False), references, metadata, prompt)


def score(name: str, options: Mapping[str, Any], asked: RewardRequest) -> Score:
    """What a built-in function gives."""
    return evaluate(build_function(name, dict(options), TOOLS), asked)


def values_or_kinds(outcomes: Iterable[Outcome]) -> list[float | FailureKind]:
    return [outcome.value if isinstance(outcome, Score) else outcome.kind for outcome in outcomes]


def values(outcomes: Iterable[Outcome]) -> list[float]:
    """Of responses all of which are scored."""
    found = values_or_kinds(outcomes)
    assert not any(isinstance(one, FailureKind) for one in found), found
    return found


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


def worker_of(rewards: RewardsConfig, service: str = "reward", **timeouts: float) -> RewardWorker:
    least = {"object_timeout_s": 5.0, "start_timeout_s": 120.0, "function_timeout_s": 20.0, "group_timeout_s": 120.0}
    return RewardWorker(rewards, service, **{**least, **timeouts}, device="cpu", dtype="float32")


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
    siblings = [make_trajectory(f"{prompt_id}#{i}", (0,)) for i in range(len(texts))]
    responses = [Response(text, num_tokens=1, is_truncated=False) for text in texts]
    return TrajectoryGroup(prompt, tuple(replace(t, response=r) for t, r in zip(siblings, responses, strict=True)))


LONG = " ".join(f"word{i}" for i in range(22))

AERORL = ("rewards=aerorl",)

PUBLISHED = (  # the options of aeroRL's value benchmark; its threshold is 0.5
    "rewards=aerorl", "rewards.components.0.weight=0.45", "rewards.components.3.weight=0.05",
    "rewards.components.2.options.require_json=true", r"rewards.components.2.options.regex_pattern='^\{.*\}$'",
    "rewards.components.3.options.target_tokens=32", "rewards.components.3.options.latency_budget_ms=400.0",
)  # fmt: skip


def record(
    id_: str | None, response: str, reference: Any, evidence: Any = None, claimed: Any = None, **metadata: Any
) -> dict[str, Any]:
    stated = {"evidence_entities": evidence, "claimed_entities": claimed, **metadata}
    return {
        "id": id_,
        "prompt": "What is it?",
        "response": response,
        "reference": reference,
        "metadata": {key: value for key, value in stated.items() if value is not None},
    }


def answer(text: str, **more: str) -> str:
    return json.dumps({"answer": text, **more})


SIX_ROWS = (
    record("ok-1", answer("stop"), "stop", ["stop"], ["stop"], latency_ms=80),
    record("format-bad-contains", "answer: red", "red", ["red"], ["red"], latency_ms=120),
    record("grounding-bad", answer("nike"), "adidas", ["adidas"], ["nike"], latency_ms=210),
    record("grounding-hidden", answer("nike"), "nike", ["adidas"], ["nike"], latency_ms=130),
    record("cost-bad", answer("cat", reasoning=LONG), "cat", ["cat"], ["cat"], latency_ms=1600),
    record("ok-2", answer("fragile"), "fragile", ["fragile"], ["fragile"], latency_ms=95),
)


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def options(words: Sequence[str], folder: Path, **changes: Any) -> ScoringOptions:
    rewards = load_config(words, is_complete=False).rewards
    least = {"timeout_s": 60.0, "pass_threshold": 0.5, "top_k": 3, "max_ids": 1000, "writes_rows": False}
    return ScoringOptions(rewards=rewards, folder=folder, **{**least, **changes})


def score_file(path: Path, words: Sequence[str], *, num_processes: int = 1, **changes: Any) -> dict[str, Any]:
    """The report of a file."""
    chosen = options(words, path.parent, **changes)
    source = open_source(path, needs_images=chosen.rewards.needs_images)
    summary = score_source(source, chosen, num_processes=num_processes)
    return summary.report(chosen.rewards.accuracy_component, chosen.pass_threshold)

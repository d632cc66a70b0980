"""Episodes on real Ray: an actor killed in turn 3, environments that hang, die or raise. Nothing is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from episode_data import Scripted, engine_settings, episode_config
from small_cluster import lasting_pool, start

from mobula.actors.environments.base import Action, Reset, Step
from mobula.actors.environments.rows import ENVIRONMENT, environment_split
from mobula.actors.processors.chat import ChatProcessor
from mobula.actors.rollout.client import RolloutClient
from mobula.actors.rollout.episodes import EpisodeActor, EpisodeSettings
from mobula.cluster.errors import RewardError
from mobula.cluster.records.media import MediaStore
from mobula.cluster.records.trajectory import FinishReason, GroupSummary, Prompt, TrajectoryGroup
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.rollout.dispatcher import RetryingRollouts
from mobula.cluster.rollout.in_flight import PROMPTS, TOKENS_KEPT, InFlightRequests
from mobula.deploy.serve.rollout import IMAGES, JSON_FILE, PAGE_FILE
from mobula.learner.policies.tiny import TINY
from mobula.rewards.contract import RewardRequest
from mobula.rewards.functions.plugin import EnvironmentReward

pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.timeout(600)]

SETTINGS = SamplingSettings(num_samples=2, temperature=0.8, max_tokens=5, seed=7)

NUM_TURNS = 5

DEADLINES_S = {"start_s": 120, "rollout_s": 60, "sync_s": 10, "sign_s": 60, "probe_s": 60, "stop_s": 1}


class Rollouts:
    """Two rollout actors behind a pool, with everything that a run has between it and them."""

    def __init__(self, model: Path, *, host: str) -> None:
        words = [f"environment.host={host}", "environment.num_train=1", "environment.step_timeout_s=2"]
        self.config = episode_config(model, *words, f"environment.options={{num_turns: {NUM_TURNS}}}")
        store = MediaStore(ray.put, 1 << 28)
        self.chat = ChatProcessor(str(model), self.config.data, self.config.sampler, store, keep_files=False)
        self.in_flight, self.retries = InFlightRequests(SETTINGS.max_tokens), Counter[str]()
        self.summaries: list[GroupSummary] = []
        self._engine = engine_settings(model, self.chat)
        self.pool = lasting_pool(self._spawn)
        self._rollouts = RetryingRollouts(
            self.pool,
            self.in_flight,
            max_retries=1,
            on_retry=lambda kind: self.retries.update([kind]),
            on_sampled=self.summaries.append,
        )

    async def _spawn(self, index: int) -> RolloutClient:
        config, name = self.config, f"rollout/{index}"
        episodes = EpisodeSettings(config.environment, config.data, keeps_files=False)
        role = ("huggingface", self._engine, episodes)
        handle = start(EpisodeActor, name, *role, object_timeout_s=10, max_concurrency=100, options={})
        return RolloutClient(handle, name, in_flight_requests=self.in_flight, **DEADLINES_S)

    def prompt(self, name: str, **options: Any) -> Prompt:
        row = environment_split(self.config.environment, "train", takes_images=True).rows[0]
        prompt = self.chat.prepare(row, f"0/0/{name}")
        return replace(prompt, metadata={ENVIRONMENT: {**prompt.metadata[ENVIRONMENT], "options": options}})

    async def group(self, name: str, **options: Any) -> TrajectoryGroup:
        generated = await self._rollouts.generate(self.prompt(name, **options), SETTINGS)
        return await generated.group


@pytest.fixture(params=["inline", "process"])
async def rollouts(
    local_ray: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> AsyncIterator[Rollouts]:
    model = TINY["qwen2.5-vl"](tmp_path_factory.mktemp("episodes") / "model")
    found = Rollouts(model, host=request.param)
    await found.pool.start()
    yield found
    await found.pool.close()


@pytest.mark.parametrize("rollouts", ["inline"], indirect=True)
async def test_episodes_of_an_actor_killed_in_turn_3_go_on_elsewhere(rollouts: Rollouts, tmp_path: Path) -> None:
    """The environment kills the process that it runs in, once; the group is that of an actor that lived."""
    struck = await rollouts.group("x", fault="kill", turn=3, marker=str(tmp_path / "killed"))
    whole = await rollouts.group("x", marker=str(tmp_path / "killed"))
    assert rollouts.retries == {"WorkerDiedError": 1}
    assert rollouts.in_flight.resumed[PROMPTS] == 1
    two_turns = [sum(turn.end - turn.start for turn in t.response.turns[:2]) for t in struck.trajectories]
    assert rollouts.in_flight.resumed[TOKENS_KEPT] >= max(two_turns) - SETTINGS.max_tokens
    for found, other in zip(struck.trajectories, whole.trajectories, strict=True):
        assert found.finish_reason is FinishReason.TERMINATED and len(found.response.turns) == NUM_TURNS
        assert found.actions.token_ids.tolist() == other.actions.token_ids.tolist()
        assert found.behavior_logprobs.tolist() == pytest.approx(other.behavior_logprobs.tolist(), abs=1e-4)
        assert found.response == other.response
        assert [m.key for m in found.actions.media] == [m.key for m in other.actions.media]


@pytest.mark.parametrize("rollouts", ["process"], indirect=True)
async def test_an_environment_that_fails_costs_its_episodes_and_is_counted_by_kind(rollouts: Rollouts) -> None:
    """Each of the two siblings is tried twice; none has a reward, and the actors go on."""
    kinds = {"hang": "timed_out", "raise": "raised", "reset": "raised", "die": "process_died"}
    score = EnvironmentReward(None, discount=1.0)
    for fault, kind in kinds.items():
        group = await rollouts.group(fault, fault=fault, turn=2)
        assert rollouts.summaries[-1].failures == {kind: 4}, fault
        for trajectory in group.trajectories:
            assert trajectory.response.failure.startswith(kind)
            with pytest.raises(RewardError, match=kind):
                score(RewardRequest(trajectory.response, (), {}, ""))
    well = await rollouts.group("well")
    assert [score(RewardRequest(t.response, (), {}, "")).value for t in well.trajectories] == [15.0, 15.0]
    assert rollouts.retries == {} and rollouts.summaries[-1].failures == {}


class Patchy(Scripted):
    """Hangs in the second turn of every other episode."""

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Reset:
        self._hangs, self._num_taken = seed % 2 == 1, 0
        return super().reset(seed=seed, options=options)

    def step(self, action: Action) -> Step:
        self._num_taken += 1
        if self._hangs and self._num_taken == 2:
            time.sleep(600)
        return super().step(action)


def test_episodes_are_written_down_and_a_hung_environment_costs_its_episode(tmp_path: Path) -> None:
    model = TINY["qwen2.5-vl"](tmp_path / "model")
    words = [
        "policy=tiny_qwen2_5_vl", "resources=laptop", "sampler=huggingface", "data=environment", "rewards=environment",
        f"policy.model={model}", f"folder={tmp_path}", f"environment.name={__name__}:Patchy", "environment.host=ray",
        "environment.start_timeout_s=300", "environment.reset_timeout_s=120", "environment.step_timeout_s=5",
        "environment.retries=0", "environment.num_train=1", "environment.num_validation=1", "environment.num_test=4",
        "data.max_prompt_tokens=400", "data.max_pixels=50176", "sampler.max_images_per_prompt=8",
        "sampler.max_tokens=6",
    ]  # fmt: skip
    options = ["--episodes", "4", "--batch-size", "4", "--temperature", "0.7", "--top-p", "0.9", "--top-k", "64"]
    options += ["--seed", "3", "--output", str(tmp_path / "seen")]
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parent), *sys.path]))
    done = subprocess.run(
        [sys.executable, "-m", "mobula.deploy.cli", "rollout", *options, *words],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "seen" / JSON_FILE).read_text())
    good, hung = ([e for e in found["episodes"] if bool(e["failure"]) is failed] for failed in (False, True))
    assert [episode["reward"] for episode in good] == [6.0, 6.0]  # turns 1, 2 and 3
    ends = [(e["reward"], e["failure"].partition(":")[0], len(e["turns"])) for e in hung]
    assert ends == [(None, "timed_out", 1)] * 2
    assert all(len(e["turns"]) == 3 and len(e["turns"][0]["images"]) == 1 for e in good)
    named = {name for e in found["episodes"] for t in e["turns"] for name in t["images"]}
    assert named <= {path.name for path in (tmp_path / "seen" / IMAGES).iterdir()}
    assert "top-p 0.9, top-k 64" in found["summary"]["sampler"]
    assert found["summary"]["without a reward"] == 2 and found["summary"]["mean reward"] == 6.0
    page = (tmp_path / "seen" / PAGE_FILE).read_text()
    assert page.count("<article>") == 4 and page.count("timed_out") == 2 and "data:image/png" in page

"""Episodes: turns/s of an engine whose environments take 50 ms a step over those that take none, and what a turn costs.

While environments compute, the engine samples turns of other episodes: it should lose little.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks.harness.measure import Claim, Effort, Findings, Measurements, interleave, share
from benchmarks.harness.stage import Stage, engines, private_ray, scratch_config
from benchmarks.simulation.slow_environment import SlowImages
from mobula.actors.environments.rows import ENVIRONMENT
from mobula.actors.rollout.episodes import Episode, ObservationBudget
from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.partial_response import SampledSequence
from mobula.cluster.records.trajectory import FinishReason, Prompt, WeightSpan
from mobula.cluster.rollout.rollout_pool import RolloutPool
from mobula.cluster.runtime.object_store import fetch
from mobula.configs.schema import RunConfig
from mobula.deploy.wiring.roles import sampling_settings

NUM_CONCURRENT = 64
NUM_PROMPTS = 24  # of one round, 8 episodes each: three times as many as run at a time
NUM_TURNS = 10
STEP_S = 0.05
MAX_TURN_TOKENS = 8
NUM_BRIDGED = 300
SETTINGS = (
    "resources.rollout.num_workers=1", "data=environment", "rewards=environment", "environment.host=inline",
    "environment.name=benchmarks.simulation.slow_environment:SlowImages",
    f"environment.options={{num_turns: {NUM_TURNS}}}", f"environment.max_concurrent={NUM_CONCURRENT}",
    "environment.max_tokens=512", f"sampler.max_tokens={MAX_TURN_TOKENS}", "sampler.max_images_per_prompt=12",
    "environment.num_validation=8", "environment.num_test=8",
)  # fmt: skip
BUSY_TARGET, BRIDGE_TARGET_MS, BYTES_TARGET = 0.8, 1.0, 1.5


def measure(effort: Effort, overrides: Sequence[str]) -> Findings:
    """One engine, with and without the delay by turns."""
    with scratch_config(SETTINGS, overrides) as config, private_ray(config):
        return asyncio.run(_measure(effort, config))


async def _measure(effort: Effort, config: RunConfig) -> Findings:
    async with engines(config) as (stage, inference):
        rounds = stage.prompts(effort.warmups + effort.repeats, NUM_PROMPTS)
        sides = {
            "delayed": partial(_turns_per_s, config, inference.rollouts, rounds, STEP_S),
            "immediate": partial(_turns_per_s, config, inference.rollouts, rounds, 0.0),
        }
        found = await interleave(sides, effort)
        copies = await _image_copies(config, inference.rollouts, rounds[0][0])
        bridge_ms = _bridge_ms(stage, rounds[0][0])
    what = f"{NUM_CONCURRENT} episodes of {NUM_TURNS} turns at a time, an image a turn, steps of"
    seconds = {"delayed": STEP_S, "immediate": 0.0}
    series = {
        name: Measurements(f"{what} {1000 * seconds[name]:g} ms", "turns/s", values) for name, values in found.items()
    }
    series["bridge"] = Measurements("tokens and image of one observation, from its message", "ms", bridge_ms)
    busy = share(found["delayed"], found["immediate"])
    claims = (
        Claim("turns/s with steps of 50 ms / with none", busy, BUSY_TARGET),
        Claim("ms of the bridge a turn", series["bridge"].median, BRIDGE_TARGET_MS, at_least=False),
        Claim("bytes of a group as it travels / bytes of its distinct images", copies, BYTES_TARGET, at_least=False),
    )
    settings = {
        "prompts": NUM_PROMPTS,
        "samples_per_prompt": config.algorithm.samples_per_prompt,
        "max_turn_tokens": MAX_TURN_TOKENS,
        "host": config.environment.host,
    }
    return Findings(settings, series, claims)


async def _turns_per_s(
    config: RunConfig, pool: RolloutPool, rounds: list[list[Prompt]], step_s: float, round_number: int
) -> float:
    asked = [_delayed(prompt, step_s) for prompt in rounds[round_number]]
    settings = sampling_settings(config)
    started = time.perf_counter()
    groups = await asyncio.gather(*(pool.generate(p, settings.for_prompt(p.prompt_id)) for p in asked))
    seconds = time.perf_counter() - started
    num_episodes = sum(generated.summary.num_trajectories for generated in groups)
    assert not any(generated.summary.failures for generated in groups)
    return num_episodes * NUM_TURNS / seconds


def _delayed(prompt: Prompt, step_s: float) -> Prompt:
    task = {**prompt.metadata[ENVIRONMENT], "options": {"step_s": step_s}}
    name = f"{prompt.prompt_id}/{step_s:g}"
    return replace(prompt, prompt_id=name, metadata={**prompt.metadata, ENVIRONMENT: task})


async def _image_copies(config: RunConfig, pool: RolloutPool, prompt: Prompt) -> float:
    """Bytes of a group in transport over the bytes of the distinct images of its later turns."""
    generated = await pool.generate(replace(prompt, prompt_id="bytes"), sampling_settings(config))
    [group] = await asyncio.to_thread(fetch, [generated.group], timeout_s=60, what="a group of episodes")
    bare: Any = replace(group, prompt=replace(group.prompt, media=(), media_spans=()))
    distinct = {handle.key: handle.num_bytes for t in group.trajectories for handle in t.actions.media}
    return len(pickle.dumps(bare)) / sum(distinct.values())


def _bridge_ms(stage: Stage, prompt: Prompt) -> tuple[float, ...]:
    """The time of `ObservationBudget.admit` for one observation, with images that were processed before."""
    config, chat = stage.prepared.config, stage.prepared.processor
    budget = ObservationBudget(config.environment, chat, model=config.policy.model, max_images=NUM_BRIDGED)
    environment = SlowImages(num_turns=NUM_TURNS)
    observation = environment.reset(seed=0, options={}).observation
    found = []
    for _ in range(NUM_BRIDGED):
        episode = Episode()
        ids = np.array([1, chat.eos_token_ids[0]], dtype=np.int32)
        nothing = np.zeros(len(ids), dtype=np.float32)
        turn = SampledSequence(TokenActions(ids), nothing, (WeightSpan(0, 0, len(ids)),), FinishReason.STOP)
        episode.add_turn(turn)
        started = time.perf_counter()
        assert budget.admit(episode, prompt, observation)
        found.append(1000 * (time.perf_counter() - started))
    return tuple(found[1:])

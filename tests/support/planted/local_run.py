"""LocalRun: a run of a tiny model in one process, with the plain roles of a run and without Ray; writes a run folder.

Engine, learner, reference, rewards, metrics and samples are those of `mobula train`; dispatcher, replay buffer, weight
transfer between processes and recovery are left out; held-out prompts are sampled greedily before and after.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from metrics_data import make_keeper
from one_learner import at_hand, saved

from mobula.actors.datasets.prompts import PromptSource
from mobula.actors.reference.scorer import ReferenceScorer
from mobula.actors.rollout.actor import RolloutActor
from mobula.cluster.metrics.definitions import CounterName, MetricName
from mobula.cluster.metrics.hub import Metrics
from mobula.cluster.metrics.report.run_folder import METRICS_FILE, SAMPLES_FILE
from mobula.cluster.metrics.sinks.jsonl import JsonlSink
from mobula.cluster.metrics.step_records import EvaluationRecord
from mobula.cluster.metrics.summary import interval_of_mean
from mobula.cluster.records.partial_response import Attempt
from mobula.cluster.records.trajectory import Prompt, Reward, ScoredGroup, TrajectoryGroup
from mobula.cluster.replay.trajectory_log import TrajectoryLog
from mobula.cluster.roles import ReplayStats
from mobula.configs.schema import RunConfig
from mobula.deploy.host.run_folder import write_config
from mobula.deploy.wiring.persistence import trajectory_log
from mobula.deploy.wiring.preparation import Prepared, prepare
from mobula.deploy.wiring.roles import engine_settings, sampling_settings
from mobula.deploy.wiring.warm_start import warm_start
from mobula.learner.learner import Learner
from mobula.rewards.components import RewardScoring
from mobula.rewards.pool.worker import reward_request
from mobula.rewards.tools import Tools

BUCKET_BYTES = 1 << 24
EMPTY = ReplayStats(num_ready=0, num_taken=0, num_bytes=0, oldest_age_s=0.0)
NUM_HELD_OUT = 64  # prompts of an evaluation
MAX_TRIES = 3  # prompts for each group of a step, before the run ends


class Awaited:
    """The learner as the warm start calls it."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    async def supervised_step(self, examples: Sequence[Any]) -> dict[str, float]:
        return self._learner.supervised_step(at_hand(examples))

    async def answer_accuracy(self, examples: Sequence[Any]) -> float:
        return self._learner.answer_accuracy(at_hand(examples))


class LocalRun:
    """One run. `cache` holds states after the warm start, which runs of equal data and model share."""

    def __init__(self, config: RunConfig, cache: Path) -> None:
        self._config = config
        self._cache = cache
        config.run_folder.mkdir(parents=True, exist_ok=True)
        write_config(config)
        self._prepared: Prepared = prepare(config, lambda value: value)  # type: ignore[assignment]
        self._actor = RolloutActor(config.sampler.kind, engine_settings(self._prepared, 0), object_timeout_s=5)
        self._learner = Learner(config, 0, 1, self._prepared.processor.media_token_ids)
        timeouts = config.timeouts
        tools = self._tools = Tools.timed(1, timeouts.reward_s, timeouts.start_s, "cpu", "float32")
        self._rewards = RewardScoring(config.rewards, None, tools)
        self._source: PromptSource[Any, Prompt] = self._prepared.source()
        is_kept = config.replay.trajectory_log
        self._log: TrajectoryLog | None = trajectory_log(config.run_folder, config) if is_kept else None
        folder = config.run_folder
        samples = make_keeper(folder / SAMPLES_FILE, limit=24, num_steps=config.num_steps, seed=0)
        sink = JsonlSink(folder / METRICS_FILE, version=0)
        accuracy = config.rewards.accuracy_component
        self._metrics = Metrics([sink], time.perf_counter, accuracy_component=accuracy, samples=[samples])

    async def run(self) -> None:
        """Warm start, then the steps of the run."""
        await self._actor.start()
        self._learner.connect("")
        await self._warm_start()
        self._learner.begin_rl()
        self._reference = self._frozen()
        await self._push(0)
        is_behind = self._config.algorithm.max_staleness > 0
        await self._evaluate(0)
        groups = await self._groups()
        for version in range(1, self._config.num_steps + 1):
            if not groups:
                break
            with self._metrics.step(version) as step:
                report = self._learner.update(groups, version)
                if self._log is not None:
                    self._log.append(version, groups)
                following = await self._groups() if is_behind else []
                await self._push(version)
                step.record(groups, report, EMPTY)
            groups = following or await self._groups()
        await self._evaluate(self._metrics.totals.version)
        self._metrics.close()
        self._tools.isolated.close()
        await self._actor.close()

    async def _warm_start(self) -> None:
        """Takes the state of the cache if it has one."""
        config = self._config
        parts = (config.policy, config.warm_start, config.data, config.sampler.max_tokens, config.sampler.is_flow)
        folder = self._cache / hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
        if folder.exists():
            self._learner.load(folder)
            return
        await warm_start(self._prepared, Awaited(self._learner))  # type: ignore[arg-type]
        draft = saved(self._learner, folder.with_name(f"{folder.name}.{os.getpid()}"))
        with suppress(OSError):  # another process was faster
            draft.rename(folder)

    def _frozen(self) -> ReferenceScorer | None:
        config = self._config
        if config.algorithm.kl.coef == 0 or config.reference.place == "learner_ranks":
            return None
        self._learner.export(config.run_folder / "reference")
        scorer = ReferenceScorer(config, self._prepared.processor.media_token_ids)
        scorer.load(config.run_folder / "reference")
        return scorer

    async def _push(self, version: int) -> None:
        """Brings the learner's weights to the engine, and compares both on a prompt."""
        _, buckets = self._learner.export_weights(BUCKET_BYTES)
        await self._actor.check_manifest(self._learner.manifest())
        await self._actor.load_weights(self._learner.manifest(), BUCKET_BYTES, buckets, version)
        self._metrics.count(CounterName.WEIGHT_SYNCS, "all")
        if not self._config.sampler.is_flow and self._config.weight_sync.canary_interval > 0:
            prompt = self._source.prompt_at(0)
            expected, found = self._learner.sequence_logprobs(prompt), await self._actor.prompt_logprobs(prompt)
            self._metrics.observe(MetricName.CANARY, float(np.abs(expected - found).mean()))

    async def _groups(self) -> list[ScoredGroup]:
        """Samples and scores the groups of a step; groups with fewer than two rewards are rejected."""
        wanted, settings = self._config.algorithm.prompts_per_step, sampling_settings(self._config)
        groups: list[ScoredGroup] = []
        for _ in range(MAX_TRIES * wanted):
            prompt = self._source.next()
            own = settings.for_prompt(prompt.prompt_id)
            group, _ = await self._actor.generate(prompt, own, Attempt(prompt.prompt_id))
            scored = self._scored(group)
            if len(scored.scored_rewards) >= 2:
                groups.append(scored)
            else:
                self._metrics.count(CounterName.REJECTED, "too_few_scored")
            if len(groups) == wanted:
                return self._referred(groups)
        return []

    async def _evaluate(self, version: int) -> None:
        """Records the greedy accuracy on held-out prompts; nothing for flow models."""
        config, name = self._config, self._config.rewards.accuracy_component
        if config.sampler.is_flow:
            return
        settings = replace(sampling_settings(config), num_samples=1, temperature=0.0, top_p=1.0, keeps_sets=False)
        rewards: list[Reward] = []
        for prompt in self._prepared.fixed_prompts(config.evaluation.split, NUM_HELD_OUT).prompts:
            group, _ = await self._actor.generate(prompt, settings, Attempt(prompt.prompt_id))
            rewards += self._scored(group).scored_rewards
        if rewards:
            accuracy = sum(reward.components[name] for reward in rewards) / len(rewards)
            interval = interval_of_mean([reward.components[name] for reward in rewards], config.seed)
            self._metrics.record_evaluation(EvaluationRecord(version, accuracy, *interval, len(rewards)))

    def _scored(self, group: TrajectoryGroup) -> ScoredGroup:
        requests = [reward_request(group.prompt, each.response, ()) for each in group.trajectories]
        found = self._rewards.rewards(requests)
        failed = sum(not isinstance(each, Reward) for each in found)
        if failed:
            self._metrics.count(CounterName.REWARD_FAILURES, "failed", failed)
        rewards = tuple(each if isinstance(each, Reward) else None for each in found)
        return ScoredGroup(group.summary(), group, rewards)

    def _referred(self, groups: list[ScoredGroup]) -> list[ScoredGroup]:
        if self._reference is None:
            return groups
        scores = self._reference.score(groups)
        return [replace(group, reference_logprobs=own) for group, own in zip(groups, scores, strict=True)]


def write_done(config: RunConfig) -> None:
    """Marks a run that ended in order."""
    (config.run_folder / "done.json").write_text(json.dumps({"num_steps": config.num_steps}), encoding="utf-8")

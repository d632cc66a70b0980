"""Wrappers of a run's collaborators that report begin and end of their work to the tracer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mobula.cluster.controller import RunMetrics, StepScope
from mobula.cluster.records.trajectory import Generated, Prompt, Reward, ScoredGroup
from mobula.cluster.roles import Learner, Replay, ReplayStats, Rewards, Rollouts, SamplingSettings, UpdateReport
from mobula.cluster.tracing.spans import RunTracer, Stage

OUTCOME = "outcome"


class TracedRollouts:
    """`queued` until the first attempt on an actor (`on_attempt`), then `generated`."""

    def __init__(self, rollouts: Rollouts, tracer: RunTracer) -> None:
        self._rollouts = rollouts
        self._tracer = tracer

    async def generate(self, prompt: Prompt, settings: SamplingSettings) -> Generated:
        trace = prompt.prompt_id
        self._tracer.begin(trace, Stage.QUEUED)
        try:
            generated = await self._rollouts.generate(prompt, settings)
        except BaseException as error:
            self._tracer.finish(trace, **{OUTCOME: type(error).__name__})
            raise
        summary = generated.summary
        self._tracer.end(trace, Stage.GENERATED, tokens=summary.num_tokens, responses=summary.num_trajectories)
        return generated


def on_attempt(tracer: RunTracer, prompt_id: str) -> None:
    """A prompt is given to a rollout actor; prompts of an evaluation are in no trace."""
    if tracer.is_open(prompt_id, Stage.QUEUED):
        tracer.end(prompt_id, Stage.QUEUED)
        tracer.begin(prompt_id, Stage.GENERATED)


class TracedRewards:
    """`scored`: what of a group was not scored while its siblings were sampled."""

    def __init__(self, rewards: Rewards, tracer: RunTracer) -> None:
        self._rewards = rewards
        self._tracer = tracer

    async def score(self, group: Any, group_id: str) -> Sequence[Reward | None]:
        self._tracer.begin(group_id, Stage.SCORED)
        rewards = await self._rewards.score(group, group_id)
        self._tracer.end(group_id, Stage.SCORED, unscored=sum(reward is None for reward in rewards))
        return rewards


class TracedReplay:
    """`buffered`, and the end of each trace: trained, or rejected for a reason."""

    def __init__(self, replay: Replay, tracer: RunTracer) -> None:
        self._replay = replay
        self._tracer = tracer

    async def reserve(self, group: ScoredGroup) -> None:
        self._tracer.begin(group.summary.group_id, Stage.BUFFERED)
        await self._replay.reserve(group)

    async def put(self, groups: Sequence[ScoredGroup]) -> None:
        await self._replay.put(groups)

    async def reject(self, group_id: str, reason: str) -> None:
        self._tracer.finish(group_id, **{OUTCOME: reason})
        await self._replay.reject(group_id, reason)

    async def take(self, num_groups: int) -> list[ScoredGroup]:
        groups = await self._replay.take(num_groups)
        for group in groups:
            self._tracer.end(group.summary.group_id, Stage.BUFFERED)
        return groups

    async def release(self, groups: Sequence[ScoredGroup]) -> None:
        await self._replay.release(groups)
        for group in groups:
            self._tracer.finish(group.summary.group_id, **{OUTCOME: Stage.TRAINED.value})

    async def stats(self) -> ReplayStats:
        return await self._replay.stats()


class TracedLearner:
    """`trained`: the update."""

    def __init__(self, learner: Learner, tracer: RunTracer) -> None:
        self._learner = learner
        self._tracer = tracer

    async def update(self, groups: Sequence[ScoredGroup]) -> UpdateReport:
        for group in groups:
            self._tracer.begin(group.summary.group_id, Stage.TRAINED)
        report = await self._learner.update(groups)
        for group in groups:
            self._tracer.end(group.summary.group_id, Stage.TRAINED, version=report.version)
        return report


class TracedMetrics:
    """The phases of each step."""

    def __init__(self, metrics: RunMetrics, tracer: RunTracer) -> None:
        self._metrics = metrics
        self._tracer = tracer

    @contextmanager
    def step(self, step: int) -> Iterator[StepScope]:
        with self._tracer.step(step) as trace, self._metrics.step(step) as scope:
            yield _TracedStep(scope, self._tracer, trace)


class _TracedStep:
    def __init__(self, scope: StepScope, tracer: RunTracer, trace: str) -> None:
        self._scope = scope
        self._tracer = tracer
        self._trace = trace

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        self._tracer.begin(self._trace, phase)
        try:
            with self._scope.timed(phase):
                yield
        finally:
            self._tracer.end(self._trace, phase)

    def record(self, groups: Sequence[ScoredGroup], update: UpdateReport, replay: ReplayStats) -> None:
        self._scope.record(groups, update, replay)

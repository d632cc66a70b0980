"""Controller: the main loop of a run, and the interfaces of its collaborators."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from mobula.cluster.errors import RunStopped
from mobula.cluster.guard.guard import Guard, NoGuard
from mobula.cluster.metrics.hub import Metrics
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.cluster.recovery.checkpoints import Checkpoints
from mobula.cluster.recovery.stop_request import StopRequest
from mobula.cluster.roles import Learner, Reference, ReplayStats, Weights
from mobula.cluster.workers.supervisor import Supervisor


class HeldOutEvaluator(Protocol):
    """Evaluates the published weights, on its own schedule."""

    def evaluating(self) -> AbstractAsyncContextManager[None]:
        """Evaluates in the background while the body runs."""

    async def maybe_run(self, version: int) -> None:
        """Starts an evaluation of `version` if one is due. The version stays published until `finish` returns."""

    async def finish(self) -> None: ...


class GroupProducer(Protocol):
    """Fills the replay buffer while the body runs."""

    def streaming(self) -> AbstractAsyncContextManager[None]: ...


class GroupQueue(Protocol):
    """Source of a step's groups: the replay buffer, or the rows of an offline job."""

    async def take(self, num_groups: int) -> list[ScoredGroup]: ...

    async def release(self, groups: Sequence[ScoredGroup]) -> None: ...

    async def stats(self) -> ReplayStats: ...


@dataclass(frozen=True, kw_only=True)
class Controller:
    """Runs the loop of a run.

    Version v is the state of the learner after v steps; step v + 1 trains from version v and makes version v + 1. The
    loop is the same for synchronous and asynchronous training, with and without a reference; only collaborators differ.
    """

    total_steps: int
    groups_per_step: int
    checkpoints: Checkpoints
    weights: Weights
    supervisor: Supervisor
    rollouts: GroupProducer
    replay: GroupQueue
    reference: Reference
    learner: Learner
    evaluator: HeldOutEvaluator
    metrics: Metrics
    stop: StopRequest
    guard: Guard = field(default_factory=NoGuard)

    async def run(self) -> int:
        """Trains until version `total_steps` and returns it."""
        version = await self.checkpoints.resume()
        await self.weights.publish(version)
        async with (
            self.supervisor.watching(),
            self.weights.settling(),
            self.rollouts.streaming(),
            self.evaluator.evaluating(),
            self.checkpoints.writing(),
            self.stop.accepting_requests(),
        ):
            try:
                async with self.stop.interruptible():
                    await self.evaluator.maybe_run(version)
                while version < self.total_steps:
                    with self.metrics.step(version + 1) as step:
                        with step.timed("wait_for_rollouts"):
                            async with self.stop.interruptible():
                                groups = await self.replay.take(self.groups_per_step)
                        with step.timed("reference"):
                            groups = await self.reference.score(groups)
                        with step.timed("update"):
                            update = await self.learner.update(groups)
                        with step.timed("evaluation"):
                            await self.evaluator.finish()  # before the push replaces the evaluated weights
                            update = await self.guard.inspect(groups, update)  # may restore older weights
                        with step.timed("weight_sync"):
                            version = await self.weights.publish(update.version)
                        await self.replay.release(groups)
                        step.record(groups, update, await self.replay.stats())
                        with step.timed("evaluation"):
                            async with self.stop.interruptible():
                                await self.evaluator.maybe_run(version)
                        with step.timed("checkpoint"):
                            await self.checkpoints.maybe_save(version)
            except RunStopped:
                await self.checkpoints.ensure_saved(version)
                raise
        return version

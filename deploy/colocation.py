"""Whether engines and learner have devices of their own, or take turns on the same ones."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from cluster.gpu_lease import GpuLease, LeasedLearner, LeasedRollouts, LeasedWeights
from cluster.restoring import RestoringLearner
from cluster.roles import Learner, Rollouts, Weights
from cluster.rollout_pool import RolloutPool
from configs.schema import RunConfig


class Sharing(Protocol):
    """Rollouts, learner and weights as the loop is to call them."""

    def rollouts(self, rollouts: Rollouts) -> Rollouts: ...

    def learner(self, learner: Learner, before: Callable[[], Awaitable[None]]) -> Learner:
        """`before` is awaited while engines may still sample."""
        ...

    def weights(self, weights: Weights) -> Weights: ...


class Apart:
    """Everybody has a device: nobody waits for a turn."""

    def rollouts(self, rollouts: Rollouts) -> Rollouts:
        return rollouts

    def learner(self, learner: Learner, before: Callable[[], Awaitable[None]]) -> Learner:
        return learner

    def weights(self, weights: Weights) -> Weights:
        return weights


class InTurns:
    """One lease for all of them."""

    def __init__(self, lease: GpuLease) -> None:
        self._lease = lease

    def rollouts(self, rollouts: Rollouts) -> Rollouts:
        return LeasedRollouts(rollouts, self._lease)

    def learner(self, learner: Learner, before: Callable[[], Awaitable[None]]) -> Learner:
        return LeasedLearner(learner, self._lease, before)

    def weights(self, weights: Weights) -> Weights:
        return LeasedWeights(weights, self._lease)


def sharing(config: RunConfig, rollout_pool: RolloutPool, learner: RestoringLearner) -> Sharing:
    """As `resources.colocated` says."""
    return InTurns(GpuLease(rollout_pool, learner)) if config.resources.colocated else Apart()

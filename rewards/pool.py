"""The reward pool: brings each group to the services that score it, makes rewards of what they say, counts failures."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.errors import DeadlineError, RewardError
from cluster.trajectory import Reward
from configs.schema.rewards import RewardsConfig
from rewards.contract import FailureKind, Outcome
from rewards.recipes import ComponentError, RecipeBook
from rewards.service import RewardService
from rewards.worker import GroupOutcomes

logger = logging.getLogger(__name__)


class LossCounter:
    """`failures` of a pool, and the way in which services report lost workers to it."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter({kind.value: 0 for kind in FailureKind})

    def count_loss(self, error: Exception) -> None:
        kind = FailureKind.WORKER_HUNG if isinstance(error, DeadlineError) else FailureKind.WORKER_DIED
        self.failures[kind] += 1


class RewardPool:
    """Implements `cluster.roles.Rewards` over services, which are asked side by side unless gates set an order.

    A response that could not be scored is counted in `failures` by kind and never becomes a number: with
    `rewards.on_failure=exclude` there is None in its place, with `stop` it raises.
    """

    def __init__(self, rewards: RewardsConfig, services: Mapping[str, RewardService], losses: LossCounter) -> None:
        """`services` are by the name that components give; `losses` is what they report to."""
        self._book = RecipeBook(rewards)
        self._stages = rewards.service_stages()
        self._on_failure = rewards.on_failure
        self._losses = losses
        self.services = services

    @property
    def failures(self) -> Counter[str]:
        """How often what befell a response or a worker, since the pool was built."""
        return self._losses.failures

    async def score(self, group: Any) -> tuple[Reward | None, ...]:
        """One reward a trajectory, in order; None where it could not be scored and failures exclude.

        Waits for a free place at a worker of each service.

        Raises:
            RewardError: a response could not be scored and failures stop the run; or too many workers were lost over
                this group; or a worker could not get at the group.
            WorkerDiedError: every worker of a service was lost too often.
            LostObjectError: the group went with the node that held it.
        """
        found: list[GroupOutcomes] = []
        for stage in self._stages:
            earlier = _merged(found) if found else None
            found += await asyncio.gather(*(self.services[name].score(group, earlier) for name in stage))
        merged = _merged(found)
        return tuple(
            self._reward(found[0].label, trajectory_id, outcomes)
            for trajectory_id, outcomes in zip(found[0].trajectory_ids, merged, strict=True)
        )

    async def check(self) -> None:
        """Replace workers that give no sign of life."""
        await asyncio.gather(*(service.check() for service in self.services.values()))

    async def close(self) -> None:
        await asyncio.gather(*(service.close() for service in self.services.values()))

    def _reward(self, label: str, trajectory_id: str, outcomes: Mapping[str, Outcome]) -> Reward | None:
        try:
            return self._book.reward(label, outcomes)
        except ComponentError as error:
            self.failures[error.kind] += 1
            logger.warning("%s has no reward: %s %s: %s", trajectory_id, error.component, error.kind, error.reason)
            if self._on_failure == "stop":
                raise RewardError(
                    f"{trajectory_id}: reward component {error.component!r} {error.kind} ({error.reason}): "
                    "mend it, or set rewards.on_failure=exclude"
                ) from error
            return None


def _merged(parts: Sequence[GroupOutcomes]) -> list[dict[str, Outcome]]:
    """What all services said of each response."""
    return [{k: v for part in parts for k, v in part.outcomes[i].items()} for i in range(len(parts[0].outcomes))]

"""The reward pool: sends each group to the least loaded worker, replaces lost workers and counts what failed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from cluster.crew import Crew, Hosts, Place
from cluster.errors import DeadlineError, RewardError, WorkerDiedError
from cluster.ray_group import answer
from cluster.restarts import RestartPolicy
from cluster.status import WorkerStatus
from cluster.trajectory import Reward
from rewards.contract import FailureKind
from rewards.worker import GroupScore

logger = logging.getLogger(__name__)


class RewardPool:
    """Implements `cluster.roles.Rewards` and `cluster.status.Scalable` over handles of `RewardWorker` actors.

    A worker that died, or did not answer within `timeout_s`, is counted and replaced, and its group goes to another
    one, `max_attempts` times in all. `timeout_s` includes the wait behind the other `max_in_flight` groups of a worker.

    A response that could not be scored is counted in `failures` by kind and never becomes a number: `exclude` returns
    None in its place, `stop` raises.
    """

    def __init__(
        self,
        workers: Sequence[Any],
        *,
        hosts: Hosts,
        restarts: RestartPolicy,
        start_s: float,
        alive_s: float,
        timeout_s: float,
        max_in_flight: int,
        max_attempts: int,
        on_failure: Literal["exclude", "stop"],
    ) -> None:
        self._crew = Crew(
            "reward",
            workers,
            hosts,
            max_load=max_in_flight,
            restarts=restarts,
            alive_s=alive_s,
            greet=self._greet,
            on_lost=self._count_loss,
        )
        self._start_s = start_s
        self._timeout_s = timeout_s
        self._max_attempts = max_attempts
        self._on_failure = on_failure
        self.failures: Counter[str] = Counter({kind.value: 0 for kind in FailureKind})

    @property
    def workers(self) -> tuple[Any, ...]:
        """The handles that serve now; replaced ones are gone."""
        return self._crew.handles

    async def score(self, group: Any) -> tuple[Reward | None, ...]:
        """One reward a trajectory, in order; None where it could not be scored and `on_failure` is `exclude`.

        Waits for a free place at a worker.

        Raises:
            RewardError: a response could not be scored and `on_failure` is `stop`; or `max_attempts` workers were lost
                over this group; or the worker could not get at the group.
            WorkerDiedError: every worker was lost too often.
            LostObjectError: the group went with the node that held it.
        """
        return self._judge(await self._score_somewhere(group))

    def status(self) -> list[WorkerStatus]:
        return self._crew.status()

    async def scale(self, num_workers: int) -> None:
        await self._crew.scale(num_workers)

    async def check(self) -> None:
        """Replace workers that give no sign of life."""
        await self._crew.check()

    async def close(self) -> None:
        await self._crew.close()

    async def _score_somewhere(self, group: Any) -> GroupScore:
        lost: list[str] = []
        for _ in range(self._max_attempts):
            async with self._crew.place(is_urgent=bool(lost)) as place:
                try:
                    return await self._ask(place, group)
                except (WorkerDiedError, DeadlineError) as error:
                    lost.append(str(error))
                    self._crew.lose(place, error)
        raise RewardError(f"{len(lost)} reward workers were lost over one group, the last one: {lost[-1]}")

    async def _ask(self, place: Place, group: Any) -> GroupScore:
        what = f"{place.name} to score a group (timeouts.reward_s)"
        (score,) = await answer(place.handle.score.remote([group]), timeout_s=self._timeout_s, what=what)
        return score

    async def _greet(self, name: str, handle: Any) -> None:
        await answer(handle.ping.remote(), timeout_s=self._start_s, what=f"{name} to start (timeouts.start_s)")

    def _count_loss(self, error: Exception) -> None:
        kind = FailureKind.WORKER_HUNG if isinstance(error, DeadlineError) else FailureKind.WORKER_DIED
        self.failures[kind] += 1

    def _judge(self, score: GroupScore) -> tuple[Reward | None, ...]:
        for failure in score.failures:
            self.failures[failure.kind] += 1
            logger.warning(
                "%s has no reward: %s %s: %s", failure.trajectory_id, failure.component, failure.kind, failure.reason
            )
        if score.failures and self._on_failure == "stop":
            first = score.failures[0]
            raise RewardError(
                f"{first.trajectory_id}: reward component {first.component!r} {first.kind} ({first.reason}): "
                "mend it, or set rewards.on_failure=exclude"
            )
        return score.rewards

"""The reward pool: sends each group to the least loaded worker, replaces lost workers and counts what failed."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from cluster.errors import DeadlineError, RewardError, WorkerDiedError
from cluster.ray_group import answer
from cluster.trajectory import Reward
from rewards.contract import FailureKind
from rewards.worker import GroupScore

logger = logging.getLogger(__name__)

# Ends what is left of worker `index` (its old handle comes along) and returns the handle of a new one, ready to serve.
Respawn = Callable[[int, Any], Awaitable[Any]]


@dataclass
class _Slot:
    """One place in the pool, whoever fills it; `lock` is held while its worker is being replaced."""

    index: int
    handle: Any
    load: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class RewardPool:
    """Implements `cluster.roles.Rewards` over handles of `RewardWorker` actors.

    A worker that died, or did not answer within `timeout_s`, is counted and replaced, and its group goes to another
    one, `max_attempts` times in all. `timeout_s` includes the wait behind the other `max_in_flight` groups of a worker.

    A response that could not be scored is counted in `failures` by kind and never becomes a number: `exclude` returns
    None in its place, `stop` raises.
    """

    def __init__(
        self,
        workers: Sequence[Any],
        *,
        respawn: Respawn,
        timeout_s: float,
        max_in_flight: int,
        max_attempts: int,
        on_failure: Literal["exclude", "stop"],
    ) -> None:
        if not workers:
            raise ValueError("the reward pool has no worker: set resources.reward.num_workers to 1 or more")
        self._slots = [_Slot(index, handle) for index, handle in enumerate(workers)]
        self._capacity = asyncio.Semaphore(len(workers) * max_in_flight)
        self._respawn = respawn
        self._timeout_s = timeout_s
        self._max_in_flight = max_in_flight
        self._max_attempts = max_attempts
        self._on_failure = on_failure
        self.failures: Counter[str] = Counter({kind.value: 0 for kind in FailureKind})

    @property
    def workers(self) -> tuple[Any, ...]:
        """The handles that serve now; replaced ones are gone."""
        return tuple(slot.handle for slot in self._slots)

    async def score(self, group: Any) -> tuple[Reward | None, ...]:
        """One reward a trajectory, in order; None where it could not be scored and `on_failure` is `exclude`.

        Waits for a free place at a worker.

        Raises:
            RewardError: a response could not be scored and `on_failure` is `stop`; or `max_attempts` workers were lost
                over this group; or the worker could not get at the group.
        """
        async with self._capacity:
            return self._judge(await self._score_somewhere(group))

    async def _score_somewhere(self, group: Any) -> GroupScore:
        lost: list[str] = []
        for _ in range(self._max_attempts):
            slot = self._least_loaded()
            slot.load += 1
            try:
                async with slot.lock:
                    handle = slot.handle
                try:
                    return await self._ask(slot.index, handle, group)
                except (WorkerDiedError, DeadlineError) as error:
                    lost.append(str(error))
                    await self._replace(slot, handle, error)
            finally:
                slot.load -= 1
        raise RewardError(f"{len(lost)} reward workers were lost over one group, the last one: {lost[-1]}")

    async def _ask(self, index: int, handle: Any, group: Any) -> GroupScore:
        what = f"reward/{index} to score a group (timeouts.reward_s)"
        (score,) = await answer(handle.score.remote([group]), timeout_s=self._timeout_s, what=what)
        return score

    async def _replace(self, slot: _Slot, handle: Any, error: WorkerDiedError | DeadlineError) -> None:
        """Put a new worker into the slot, unless someone else who lost the same one has done so."""
        async with slot.lock:
            if slot.handle is not handle:
                return
            kind = FailureKind.WORKER_DIED if isinstance(error, WorkerDiedError) else FailureKind.WORKER_HUNG
            self.failures[kind] += 1
            logger.warning("reward/%d is replaced: %s", slot.index, error)
            slot.handle = await self._respawn(slot.index, handle)

    def _least_loaded(self) -> _Slot:
        """A free place, at a worker that is not just being replaced if there is one; capacity says that one exists."""
        free = [slot for slot in self._slots if slot.load < self._max_in_flight]
        return min(free, key=lambda slot: (slot.lock.locked(), slot.load))

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

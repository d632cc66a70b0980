"""CriticGroup: the ranks of a critic as one role, and LearnerWithCritic, the learner that trains beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mobula.cluster.errors import CheckpointError, LostObjectError, WorkerDiedError
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.cluster.roles import UpdateReport
from mobula.cluster.rollout.supervised_rows import SupervisedRows
from mobula.cluster.runtime.concurrency import outcomes, run_all
from mobula.configs.schema import TimeoutsConfig
from mobula.learner.examples.planners import NO_PLANNERS, Planners
from mobula.learner.learner_group import LearnerGroup, RankGroup
from mobula.learner.shares import Planner, Portion, as_argument, in_portions


class CriticGroup(RankGroup):
    """The handles of `mobula.learner.critic_ranks.critic_rank.CriticRank` workers, one a rank."""

    def __init__(
        self,
        spawn: Callable[[], Sequence[Any]],
        timeouts: TimeoutsConfig,
        put: Callable[[Any], Any],
        planned: Planner | None = None,
    ) -> None:
        """`put` and `planned` are as in `LearnerGroup`."""
        super().__init__(spawn, timeouts, "critic")
        self._put = put
        self._planned = planned

    async def begin(self, folder: Path) -> None:
        """Resets the critic to the policy of a checkpoint folder."""
        calls = [w.begin.remote(folder) for w in self._workers]
        await self._all(calls, self._timeouts.start_s, f"to begin with {folder}")

    async def value(self, groups: Sequence[ScoredGroup], version: int, kl: float | None) -> Any:
        """Returns a reference to the values of the groups of step `version`.

        Raises:
            LostObjectError: no rank could fetch the groups.
        """

        async def call(shared: Any, portions: Sequence[Portion | None]) -> Any:
            calls = [
                w.value.options(num_returns=2).remote(shared, version, kl, **as_argument(portion))
                for w, portion in zip(self._workers, portions, strict=True)
            ]
            await self._all([made for made, _ in calls], self._timeouts.update_s, f"to value the groups of {version}")
            return calls[0][1]

        num_ranks = len(self._workers)
        return await in_portions(call, groups, version, num_ranks=num_ranks, planned=self._planned, put=self._put)

    async def train(self, version: int, kl_scale: float) -> tuple[Mapping[str, float], float]:
        """Trains on the groups of the last `value` call; returns metrics and the number of optimizer steps."""
        calls = [w.train.remote(version, kl_scale) for w in self._workers]
        result: tuple[Mapping[str, float], float] = await self._all(
            calls, self._timeouts.update_s, f"to train on the groups of {version}"
        )
        return result


class LearnerWithCritic(LearnerGroup):
    """A learner group and a critic group: the critic values a step, then both train on it at the same time.

    They are started, restarted, saved and loaded together; a checkpoint has the form of one whose critic shares the
    learner's ranks.
    """

    def __init__(
        self,
        spawn: Callable[[], Sequence[Any]],
        timeouts: TimeoutsConfig,
        put: Callable[[Any], Any],
        beside: SupervisedRows | None,
        *,
        critic: CriticGroup,
        folder: Path,
        planners: Planners = NO_PLANNERS,
    ) -> None:
        """The critic begins with what the policy's ranks export to `folder`, which all ranks can read."""
        super().__init__(spawn, timeouts, put, beside, planners)
        self._critic = critic
        self._folder = folder
        self._kl: float | None = None  # of the last step, which the critic does not know of yet

    @property
    def groups(self) -> tuple[RankGroup, ...]:
        return (self, self._critic)

    async def start(self) -> None:
        await run_all(super().start(), *([] if self._critic.is_started else [self._critic.start()]))

    async def respawn(self) -> None:
        """Restarts the critic first: the learner's restart ends in `start`."""
        self._kl = None
        await self._critic.respawn()
        await super().respawn()

    async def begin_rl(self) -> None:
        await super().begin_rl()
        await self.export(self._folder)
        await self._critic.begin(self._folder)

    async def update(self, groups: Sequence[ScoredGroup], values: Any = None) -> UpdateReport:
        """One step of both; the values are those of the critic here.

        Raises:
            LostObjectError: no rank could fetch the groups; no rank has changed.
            WorkerDiedError: the critic has trained on groups that the policy could not fetch.
        """
        version = self.version + 1
        values = await self._critic.value(groups, version, self._kl)
        self._kl = None
        report, trained = await outcomes(
            super().update(groups, values), self._critic.train(version, self.kl_scale_at(version))
        )
        if isinstance(report, LostObjectError):
            raise WorkerDiedError(f"the critic trains on groups that the policy could not get at: {report}") from report
        for failed in (report, trained):
            if isinstance(failed, Exception):
                raise failed
        metrics, num_taken = trained
        self._kl = report.metrics.get("kl")
        counts = {"optimizer_steps": report.metrics["optimizer_steps"] + num_taken}
        return replace(report, metrics={**report.metrics, **metrics, **counts})

    async def offload(self, part: str) -> None:
        await run_all(super().offload(part), self._critic.offload(part))

    async def onload(self) -> None:
        await run_all(super().onload(), self._critic.onload())

    async def save(self, folder: Path) -> None:
        await run_all(super().save(folder), self._critic.save(folder))

    async def finish_save(self) -> bool:
        return all(await run_all(super().finish_save(), self._critic.finish_save()))

    async def load(self, folder: Path) -> int:
        self._kl = None
        version, of_critic = await run_all(super().load(folder), self._critic.load(folder))
        if version != of_critic:
            raise CheckpointError(f"{folder} holds version {version} of the policy and {of_critic} of the critic")
        return version

    async def restore(self, folder: Path, version: int) -> None:
        self._kl = None
        await run_all(super().restore(folder, version), self._critic.restore(folder, version))

    async def close(self) -> None:
        await self._critic.close()
        await super().close()

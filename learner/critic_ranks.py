"""Ranks of a critic on workers of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mobula.cluster.errors import LostObjectError, WorkerDiedError
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.cluster.roles import UpdateReport
from mobula.cluster.rollout.row_stream import SupervisedRows
from mobula.cluster.runtime.concurrency import outcomes, run_all
from mobula.configs.schema import RunConfig, TimeoutsConfig
from mobula.learner.batch import LearnerItem, minibatches_of, without_overlong
from mobula.learner.credit import Credit
from mobula.learner.critic import FOLDER, Critic, Values
from mobula.learner.examples import NO_PLANNERS, Planners
from mobula.learner.learner_group import LearnerGroup, RankGroup
from mobula.learner.policies.checkpoint import unread_policy_model
from mobula.learner.rank import AlgorithmState, CheckpointPart, Offloadable, StatefulRank
from mobula.learner.shares import Planner, Portion, ShareFetcher, StepGroups, all_ranks, as_argument, in_portions


class CriticRank(StatefulRank):
    """Predicts the values of a step's groups before the policy trains on them, then trains on the returns.

    Returns follow from rewards, log-probs and values alone, so these ranks compute them as the learner's ranks do, and
    both train at the same time. The learner's ranks save the rest of a checkpoint.

    Example:
        version, values = rank.value(groups, version=1, kl=None)
        metrics, num_taken = rank.train(version=1)
    """

    _own_folder = FOLDER

    def __init__(self, config: RunConfig, rank: int, world_size: int) -> None:
        super().__init__(config.of_critic_ranks, rank, world_size)
        self._credit = Credit(config)
        self._shares = ShareFetcher(rank, world_size, all_ranks, role="critic")
        self._critic = Critic(self._config, rank, world_size, self.reader, self.device)
        self._valued: list[list[LearnerItem]] = []  # the step under way
        self._num_items = 0  # of the step before it

    def _build(self, join: Callable[[], None]) -> None:
        join()
        self._critic.connect()

    def begin(self, folder: Path) -> None:
        """RL begins with the policy of the checkpoint `folder`, and so does the critic."""
        _, weights = unread_policy_model(self._config.policy.model_copy(update={"model": str(folder)}), torch.float32)
        self._critic.begin(weights)

    def value(
        self, groups: Sequence[ScoredGroup], version: int, kl: float | None, portion: Portion | None = None
    ) -> tuple[int, Values]:
        """The values of the groups that make `version`; from rank 0 those of all, from the others none. `kl` is what
        the policy's ranks measured in the step before; `portion` is as in `Learner.update`."""
        fetched = self._shares.fetch(StepGroups(groups, version, self._config, role="critic", portion=portion))
        if kl is not None:
            self._credit.kl.observe(kl, self._num_items)
        self._valued = self._critic.valued(fetched)
        values = [[item.values for item in group if item.values is not None] for group in self._valued]
        return version, values if self._rank == 0 else []

    def train(self, version: int, kl_scale: float) -> tuple[Mapping[str, float], float]:
        """Trains on the groups of the last `value` call; returns metrics and the number of optimizer steps."""
        algorithm = self._config.algorithm
        self._credit.kl_scale = kl_scale
        items = without_overlong(self._credit.assign(self._valued).groups, algorithm)
        parts = minibatches_of(items, algorithm, (self._config.seed, version))
        metrics = self._critic.train(parts, version)
        self._num_items, self._valued = sum(map(len, items)), []
        self.version = version
        return metrics, len(parts) - metrics["critic_skipped"] if parts else 0.0

    def load(self, folder: Path) -> int:
        self._valued, self._num_items = [], 0
        return super().load(folder)

    def close(self) -> None:
        self.finish_save()
        super().close()

    def _parts(self) -> Sequence[CheckpointPart]:
        return self._critic, AlgorithmState(self._credit, writes=False)

    def _movable(self) -> Sequence[Offloadable]:
        return (self._critic,)


class CriticGroup(RankGroup):
    """The handles of `mobula.learner.critic_ranks.CriticRank` workers, one a rank."""

    def __init__(
        self,
        spawn: Callable[[], Sequence[Any]],
        timeouts: TimeoutsConfig,
        put: Callable[[Any], Any],
        planned: Planner | None = None,
    ) -> None:
        super().__init__(spawn, timeouts, "critic")
        self._put = put
        self._planned = planned

    async def begin(self, folder: Path) -> None:
        await self._all(lambda w: w.begin.remote(folder), self._timeouts.start_s, f"to begin with {folder}")

    async def value(self, groups: Sequence[ScoredGroup], version: int, kl: float | None) -> Any:
        """Returns a reference to the values of the groups of step `version`."""

        async def call(shared: Any, portions: Sequence[Portion | None]) -> Any:
            calls = [
                w.value.options(num_returns=2).remote(shared, version, kl, **as_argument(portion))
                for w, portion in zip(self.workers, portions, strict=True)
            ]
            versions = [made for made, _ in calls]
            await self._answers(versions, self._timeouts.update_s, f"to value the groups of {version}")
            return calls[0][1]

        num_ranks = len(self.workers)
        return await in_portions(call, groups, version, num_ranks=num_ranks, planned=self._planned, put=self._put)

    async def train(self, version: int, kl_scale: float) -> tuple[Mapping[str, float], float]:
        result: tuple[Mapping[str, float], float] = await self._all(
            lambda w: w.train.remote(version, kl_scale), self._timeouts.update_s, f"to train on the groups of {version}"
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

    async def step(self, groups: Sequence[ScoredGroup], values: Any = None) -> UpdateReport:
        """One step of both; the values are those of the critic here."""
        version = self.version + 1
        values = await self._critic.value(groups, version, self._kl)
        self._kl = None
        report, trained = await outcomes(
            super().step(groups, values), self._critic.train(version, self.kl_scale_at(version))
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

    async def load(self, folder: Path) -> int:
        self._kl = None
        return await super().load(folder)

    async def restore(self, folder: Path, version: int) -> None:
        self._kl = None
        await super().restore(folder, version)

    async def close(self) -> None:
        await self._critic.close()
        await super().close()

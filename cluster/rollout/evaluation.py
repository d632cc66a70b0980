"""Evaluator: scores held-out prompts with the run's own rollout actors and reward pool, on its own schedule."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from cluster.errors import ExcludedPromptError, RewardError
from cluster.records.trajectory import Prompt, Reward
from cluster.roles import Rewards, Rollouts, SamplingSettings
from cluster.rollout.scored_sampling import sample_and_score
from cluster.workers.supervisor import background_tasks

Z_95 = 1.959964  # two-sided 95 % quantile of the normal distribution


@dataclass(frozen=True)
class EvaluationResult:
    """The held-out accuracy of one weight version with its 95 % interval [low, high]."""

    version: int
    accuracy: float  # mean of the accuracy component over the scored responses whose recipe has it
    low: float
    high: float
    mean_reward: float  # over all scored responses
    num_scored: int  # responses that the accuracy is of
    num_unscored: int


@dataclass(frozen=True)
class EvaluationSchedule:
    """Before the first step, after the last one, and after every `interval_steps` between (0: none between)."""

    interval_steps: int
    total_steps: int

    def is_due(self, version: int) -> bool:
        is_between = self.interval_steps > 0 and version % self.interval_steps == 0
        return is_between or version in (0, self.total_steps)


class Evaluator:
    """Samples every held-out prompt, `max_concurrent` at a time, and averages the accuracy component.

    It runs beside training, and yields to it where an engine has to choose (`settings.priority`). Weights stay as they
    are until it is done: `finish` comes before the next push.

    A response that could not be scored is left out of the means and counted; it is never taken for wrong. So is one of
    newer weights, of an engine that joined with what the learner had made meanwhile. `on_result` is told each result
    once; a version whose result a checkpoint holds is not evaluated again.
    """

    def __init__(
        self,
        *,
        prompts: Sequence[Prompt],
        rollouts: Rollouts,
        rewards: Rewards,
        settings: SamplingSettings,
        accuracy_component: str,
        max_concurrent: int,
        schedule: EvaluationSchedule,
        on_result: Callable[[EvaluationResult], None],
    ) -> None:
        self.results: dict[int, EvaluationResult] = {}
        self._prompts = prompts
        self._rollouts = rollouts
        self._rewards = rewards
        self._settings = settings
        self._accuracy_component = accuracy_component
        self._max_concurrent = max_concurrent
        self._schedule = schedule
        self._on_result = on_result
        self._tasks: asyncio.TaskGroup | None = None
        self._running: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def evaluating(self) -> AsyncIterator[None]:
        """Evaluate beside the body.

        Raises:
            RewardError, RolloutError: an evaluation failed; the body was cancelled.
        """
        async with background_tasks() as self._tasks:
            yield
            await self.finish()

    async def maybe_run(self, version: int) -> None:
        """Begin to evaluate `version`, whose push is the last one that was sent, if it is due and was not evaluated
        yet. The last version is waited for: there is nothing to run beside.
        """
        if not self._schedule.is_due(version) or version in self.results:
            return
        await self.finish()
        assert self._tasks is not None, "an evaluation runs within evaluating()"
        self._running = self._tasks.create_task(self._run_and_tell(version), name=f"evaluate version {version}")
        if version == self._schedule.total_steps:
            await self.finish()

    async def finish(self) -> None:
        """Wait for the evaluation that runs, if one does."""
        if self._running is not None:
            await self._running
            self._running = None

    async def _run_and_tell(self, version: int) -> None:
        self._on_result(await self.run(version, min_version=version))

    async def run(self, version: int, *, min_version: int = -1) -> EvaluationResult:
        """Evaluate `version`, which every rollout actor serves now, or once it serves `min_version`.

        Raises:
            RewardError: no response could be scored, or none has the accuracy component.
        """
        slots = asyncio.Semaphore(self._max_concurrent)
        settings = replace(self._settings, min_version=min_version)
        async with background_tasks() as tasks:
            running = [tasks.create_task(self._score(prompt, settings, version, slots)) for prompt in self._prompts]
            answers = [reward for task in running for reward in await task]
        self.results[version] = self._summarise(version, answers)
        return self.results[version]

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON."""
        return {"results": [asdict(result) for result in self.results.values()]}

    def restore(self, version: int, state: dict[str, Any]) -> None:
        """Know the results of an earlier part of this run."""
        self.results = {row["version"]: EvaluationResult(**row) for row in state["results"]}

    async def _score(
        self, prompt: Prompt, settings: SamplingSettings, version: int, slots: asyncio.Semaphore
    ) -> Sequence[Reward | None]:
        async with slots:
            try:
                _, summary, rewards = await sample_and_score(
                    self._rollouts, self._rewards, prompt, settings, on_lost=lambda kind: None
                )
            except ExcludedPromptError:  # counted and named where it was excluded
                return [None] * settings.num_samples
        return [None] * len(rewards) if max(summary.tokens_by_version) > version else rewards

    def _summarise(self, version: int, answers: Sequence[Reward | None]) -> EvaluationResult:
        scored = [reward for reward in answers if reward is not None]
        if not scored:
            raise RewardError(
                f"evaluation of version {version}: none of {len(answers)} responses could be scored; "
                "see the reward failures in the metrics, and check rewards.components and evaluation.num_prompts"
            )
        accuracy, num = mean_of_component(self._accuracy_component, scored)
        low, high = wilson_interval(accuracy, num)
        mean_reward = math.fsum(reward.value for reward in scored) / len(scored)
        return EvaluationResult(version, accuracy, low, high, mean_reward, num, len(answers) - len(scored))


def mean_of_component(name: str, rewards: Sequence[Reward]) -> tuple[float, int]:
    """The mean of one component over the rewards that have it, and how many do: recipes may leave it out.

    Raises:
        RewardError: none has it.
    """
    values = [reward.components[name] for reward in rewards if name in reward.components]
    if not values:
        known = sorted({component for reward in rewards for component in reward.components})
        raise RewardError(
            f"rewards.accuracy_component={name} is in the recipe of none of {len(rewards)} held-out responses, whose "
            f"components are {known}: name one of them, or hold out prompts of a label that has it"
        )
    return math.fsum(values) / len(values), len(values)


def wilson_interval(share: float, num: int) -> tuple[float, float]:
    """The 95 % score interval of a share of `num` independent trials (Wilson 1927).

        (share + z^2 / 2n  -+  z * sqrt(share * (1 - share) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    It stays within [0, 1] and has a width even at 0 and 1. For a mean of values within [0, 1] it is conservative.
    """
    z2 = Z_95 * Z_95
    centre = share + z2 / (2 * num)
    half = Z_95 * math.sqrt(share * (1 - share) / num + z2 / (4 * num * num))
    scale = 1 + z2 / num
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)

"""Recorded groups of a run for trials, and the log-probs of their responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.trajectory import Prompt, ScoredGroup, Trajectory
from mobula.cluster.roles import UpdateReport

SPREAD_FLOOR = 1e-6


class TrialLearner(Protocol):
    """The learner of a trial: `LearnerGroup`, or anything with these three methods."""

    async def load(self, folder: Path) -> int: ...

    async def update(self, groups: Sequence[ScoredGroup]) -> UpdateReport: ...

    async def sequence_logprobs(self, prompt: Prompt) -> np.ndarray: ...


@dataclass(frozen=True)
class TrialGroup:
    """A recorded group: as the learner takes it, and its prompt and trajectories by value."""

    scored: ScoredGroup
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]

    @property
    def advantages(self) -> np.ndarray:
        """float64 [N]: rewards less their mean, divided by their standard deviation; 0 without a reward."""
        values = np.array([np.nan if reward is None else reward.value for reward in self.scored.rewards])
        spread = np.nanstd(values)
        return np.nan_to_num((values - np.nanmean(values)) / max(float(spread), SPREAD_FLOOR))

    @property
    def is_uniform(self) -> bool:
        return len({reward.value for reward in self.scored.scored_rewards}) < 2

    @property
    def best(self) -> int:
        """Index of the response with the highest reward."""
        return int(np.argmax(self.advantages))


async def response_logprob(learner: TrialLearner, prompt: Prompt, trajectory: Trajectory) -> float:
    """Returns the mean log-prob of the tokens of a response after `prompt`, at temperature 1."""
    actions = trajectory.actions
    assert isinstance(actions, TokenActions), "trials score tokens"
    ids = [np.concatenate([ids, actions.token_ids]) for ids in (prompt.compact_ids, prompt.expanded_ids)]
    whole = replace(prompt, compact_ids=ids[0], expanded_ids=ids[1])
    logprobs = await learner.sequence_logprobs(whole)
    return float(logprobs[-actions.num_steps :].mean())

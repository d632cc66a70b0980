"""Any reward functions in offline scoring: the rewards of a recipe file as one more scheme."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.errors import PreflightError
from cluster.trajectory import Response, Reward
from configs.load import load_rewards
from configs.schema.rewards import RewardsConfig
from rewards.contract import RewardRequest
from rewards.isolated import IsolatedProcess
from rewards.offline.answers import Answer
from rewards.offline.options import Options
from rewards.offline.records import Record
from rewards.offline.schemes import TOTAL_DIGITS, Scheme, Scores
from rewards.recipes import ComponentError
from rewards.scoring import Scoring
from rewards.tools import Tools

BATCH_RECORDS = 64
DEVICE, DTYPE = "cpu", "float32"  # of models: each process has its own copy


@dataclass(frozen=True)
class RecipeScheme(Scheme):
    """A scheme whose total is the recipe's own: with weights by label, gates and normalisation, it is no fixed sum.

    Its scores are the components, None where one did not run, and the total behind them.
    """

    def named(self, scores: Scores) -> dict[str, float]:
        pairs = zip(self.components, scores[:-1], strict=True)
        return {name: score for name, score in pairs if score is not None}

    def total(self, scores: Scores) -> float:
        return round(scores[-1], TOTAL_DIGITS)


class RecipeRules:
    """Scores records as a run with these rewards does; what a component could not score is counted by its failure."""

    name = "recipe"
    reads_everything = True

    def __init__(self, rewards: RewardsConfig, *, timeout_s: float) -> None:
        self.components = tuple(component.name for component in rewards.components)
        self._rewards = rewards
        self._timeout_s = timeout_s
        self._scoring: Scoring | None = None
        self._process: int | None = None
        self._last: Sequence[Reward | ComponentError] = ()

    def score_batch(
        self, records: Sequence[Record], references: Sequence[tuple[str, ...]], answers: Sequence[Answer]
    ) -> list[Scores | str]:
        scoring = self.scoring()
        requests = list(map(_request, records, references))
        batches = (requests[i : i + BATCH_RECORDS] for i in range(0, len(requests), BATCH_RECORDS))
        self._last = [reward for batch in batches for reward in scoring.rewards(batch)]
        return [self._result(reward) for reward in self._last]

    def explain(self, place: int, record: Record, answer: Answer) -> dict[str, Any]:
        reward = self._last[place]
        return {reward.component: reward.reason} if isinstance(reward, ComponentError) else dict(reward.reasons)

    def scoring(self) -> Scoring:
        """The functions, made once in each process: what was made before a fork belongs to the parent.

        Raises:
            ValueError: a function is unknown, or its options are unfit.
        """
        if self._scoring is None or self._process != os.getpid():
            isolated = IsolatedProcess(timeout_s=self._timeout_s, start_timeout_s=self._timeout_s)
            self._scoring = Scoring(self._rewards, None, Tools(isolated, DEVICE, DTYPE))
            self._process = os.getpid()
        return self._scoring

    def _result(self, reward: Reward | ComponentError) -> Scores | str:
        if isinstance(reward, ComponentError):
            return f"{reward.component}: {reward.kind}"
        return (*(reward.components.get(name) for name in self.components), reward.value)


def recipe_scheme(path: Path, options: Options, *, timeout_s: float) -> RecipeScheme:
    """The scheme of a recipe file.

    Raises:
        ConfigError: the file is missing or does not fit the schema.
        PreflightError: a function is unknown, its options are unfit, or it needs pictures.
    """
    rewards = load_rewards(path)
    if rewards.needs_pictures:
        named = ", ".join(component.name for component in rewards.components if component.needs_pictures)
        raise PreflightError(f"{path}: {named} needs pictures, which records do not hold: leave it out")
    rules = RecipeRules(rewards, timeout_s=timeout_s)
    try:
        rules.scoring()
    except ValueError as error:
        raise PreflightError(f"{path}: {error}") from error
    weights = tuple(component.weight for component in rewards.components)
    return RecipeScheme(rules, rules.components, weights, options.pass_threshold)


def _request(record: Record, references: tuple[str, ...]) -> RewardRequest:
    stated = record.metadata.generated_tokens
    num_tokens = len(record.response.split()) if stated is None else stated
    everything: Mapping[str, Any] = record.everything or {}
    is_truncated = bool(everything.get("is_truncated", False))
    return RewardRequest(
        Response(record.response, num_tokens, is_truncated), references, everything, record.prompt
    )

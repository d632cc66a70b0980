"""Any reward functions in offline scoring: the rewards of a recipe file as one more scheme."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mobula.cluster.errors import PreflightError, RewardError
from mobula.cluster.records.trajectory import Response, Reward
from mobula.configs.load import load_rewards
from mobula.configs.schema.rewards import RewardsConfig
from mobula.rewards.contract import FailureKind, RewardRequest
from mobula.rewards.isolation.deadline import InTime
from mobula.rewards.isolation.process_pool import IsolatedPool
from mobula.rewards.offline.options import ScoreOptions
from mobula.rewards.offline.rules.answers import Answer
from mobula.rewards.offline.rules.schemes import TOTAL_DIGITS, Scheme, Scores
from mobula.rewards.offline.sources.pictures import PictureFiles
from mobula.rewards.offline.sources.records import Everything, Record
from mobula.rewards.recipes import ComponentError
from mobula.rewards.scoring import RewardScoring
from mobula.rewards.tools import Tools

FUNCTION_SHARE, BATCH_SHARE = 1 / 20, 0.8  # of `timeout_s`
PICTURES = "pictures"  # stands for a component where a record's pictures cannot be had
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
    """Scores records as a run with these rewards does; what a component could not score is counted by its failure.

    `timeout_s` is what a batch may take. An answer that hangs may take a share of it, all that hang in a batch another,
    so that they are counted as timed out before the batch is late.
    """

    name = "recipe"
    reads_everything = True
    may_hang = True

    def __init__(self, rewards: RewardsConfig, folder: Path, *, timeout_s: float) -> None:
        """Paths of pictures begin in `folder`."""
        self.components = tuple(component.name for component in rewards.components)
        self._rewards = rewards
        self._files = PictureFiles(folder)
        self._timeout_s = timeout_s
        self._isolated = IsolatedPool(
            num_processes=rewards.processes,
            timeout_s=FUNCTION_SHARE * timeout_s,
            start_timeout_s=BATCH_SHARE * timeout_s,
        )
        self._in_time = InTime(timeout_s=FUNCTION_SHARE * timeout_s)
        self._scoring: RewardScoring | None = None
        self._last: Sequence[Reward | ComponentError] = ()

    @property
    def num_stuck(self) -> int:
        return self._in_time.num_stuck

    def prepare(self) -> None:
        """Make the functions.

        Raises:
            ValueError: one is unknown, or its options are unfit.
        """
        self._made()

    def close(self) -> None:
        """End the isolated processes."""
        self._isolated.close()

    def score_batch(
        self, records: Sequence[Record], references: Sequence[tuple[str, ...]], answers: Sequence[Answer]
    ) -> list[Scores | str]:
        self._made()  # before the batch's time begins
        self._isolated.deadline = self._in_time.deadline = time.monotonic() + BATCH_SHARE * self._timeout_s
        self._last = self._rewards_of(list(zip(records, references, strict=True)))
        return [self._result(reward) for reward in self._last]

    def explain(self, place: int, record: Record, answer: Answer) -> dict[str, Any]:
        reward = self._last[place]
        return {reward.component: reward.reason} if isinstance(reward, ComponentError) else dict(reward.reasons)

    def _made(self) -> RewardScoring:
        if self._scoring is None:
            self._scoring = RewardScoring(self._rewards, None, Tools(self._isolated, DEVICE, DTYPE, self._in_time))
        return self._scoring

    def _rewards_of(self, batch: Sequence[tuple[Record, tuple[str, ...]]]) -> list[Reward | ComponentError]:
        """One result a record; pictures that cannot be had cost only theirs."""
        requests = [self._request(record, references) for record, references in batch]
        scored = iter(self._made().rewards([r for r in requests if isinstance(r, RewardRequest)]))
        return [next(scored) if isinstance(request, RewardRequest) else request for request in requests]

    def _request(self, record: Record, references: tuple[str, ...]) -> RewardRequest | ComponentError:
        stated = record.metadata.generated_tokens
        num_tokens = len(record.response.split()) if stated is None else stated
        known = record.everything or Everything({})
        is_truncated = bool(known.metadata.get("is_truncated", False))
        try:
            generated = self._files.read(known.response_pictures)
            pictures = self._files.read(known.pictures) if self._rewards.needs_pictures else ()
        except RewardError as error:
            return ComponentError(PICTURES, FailureKind.FAILED, str(error))
        response = Response(record.response, num_tokens, is_truncated, generated)
        return RewardRequest(response, references, known.metadata, record.prompt, pictures)

    def _result(self, reward: Reward | ComponentError) -> Scores | str:
        if isinstance(reward, ComponentError):
            return f"{reward.component}: {reward.kind}"
        return (*(reward.components.get(name) for name in self.components), reward.value)


def recipe_scheme(path: Path, options: ScoreOptions, *, folder: Path, timeout_s: float) -> RecipeScheme:
    """The scheme of a recipe file; the records' pictures are named from `folder` on.

    Raises:
        ConfigError: the file is missing or does not fit the schema.
        PreflightError: a function is unknown, or its options are unfit.
    """
    rewards = load_rewards(path)
    try:
        with ThreadPoolExecutor(1) as thread:  # a child whose parent's own thread used OpenMP's hangs in a model
            thread.submit(_check, RecipeRules(rewards, folder, timeout_s=timeout_s)).result()
    except ValueError as error:
        raise PreflightError(f"{path}: {error}") from error
    rules = RecipeRules(rewards, folder, timeout_s=timeout_s)
    weights = {component.name: component.weight for component in rewards.components}
    by_label = {label: rewards.weights_in(recipe) for label, recipe in rewards.active_recipes.items()}
    if len(by_label) == 1:  # then there is one weight a component, and no label to tell
        weights, by_label = weights | next(iter(by_label.values())), {}
    return RecipeScheme(
        rules, rules.components, tuple(weights.values()), options.pass_threshold, weights_by_label=by_label
    )


def _check(rules: RecipeRules) -> None:
    """Make the functions once; those that score are made in each process."""
    try:
        rules.prepare()
    finally:
        rules.close()

"""Observation: the group means of a step, from rewards, lengths and the texts of a few groups."""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mobula.cluster.guard.windows import Moments, Quantity, StepValues
from mobula.cluster.metrics.step_records import StepRecord
from mobula.cluster.records.trajectory import Reward, ScoredGroup, TrajectoryGroup

TEXTS = frozenset({Quantity.REPETITION, Quantity.SCRIPT_MIX})  # need the responses' texts
GROUPS = "guard_groups"  # metric: groups behind reward and judge
TEXT_GROUPS = "guard_text_groups"  # metric: groups behind quantities of texts


@dataclass(frozen=True)
class Observer:
    """Measures `quantities` of the groups of a step.

    `judge_weights` maps judges to weights; `format_components` names the components of the format share. Of texts it
    reads `num_text_groups` groups a step, through `fetch`.
    """

    quantities: frozenset[Quantity]
    judge_weights: Mapping[str, float]
    format_components: Sequence[str]
    num_text_groups: int
    ngram: int
    fetch: Callable[..., list[Any]]
    timeout_s: float

    def observe(self, step: int, groups: Sequence[ScoredGroup], *, since: int = 0) -> StepValues:
        """Returns the means of `groups`, without those that weights before version `since` sampled in part. Fetches
        texts: call it in a thread.
        """
        groups = [group for group in groups if group.summary.oldest_version >= since]
        values: dict[Quantity, list[float]] = {
            Quantity.LENGTH: [group.summary.num_tokens / group.summary.num_trajectories for group in groups],
            Quantity.FORMAT: _means([self._formats(group.scored_rewards) for group in groups]),
            **reward_and_judge([group.scored_rewards for group in groups], self.judge_weights),
        }
        if self.quantities & TEXTS:
            values |= self._texts(groups)
        return StepValues(step, {q: Moments.of(values[q]) for q in sorted(self.quantities) if values[q]})

    def _formats(self, rewards: Sequence[Reward]) -> list[float]:
        return [r.components[name] for r in rewards for name in self.format_components if name in r.components]

    def _texts(self, groups: Sequence[ScoredGroup]) -> dict[Quantity, list[float]]:
        stride = max(1, len(groups) // self.num_text_groups)
        chosen = [group.group for group in groups[::stride][: self.num_text_groups]]
        fetched: list[TrajectoryGroup] = self.fetch(chosen, timeout_s=self.timeout_s, what="groups for the guard")
        texts = [[t.response.text for t in group.trajectories] for group in fetched]
        return {
            Quantity.REPETITION: _means([[repeated_words(text, self.ngram) for text in group] for group in texts]),
            Quantity.SCRIPT_MIX: _means([[script_mix(text) for text in group] for group in texts]),
        }


def reward_and_judge(
    rewards: Sequence[Sequence[Reward]], judge_weights: Mapping[str, float]
) -> dict[Quantity, list[float]]:
    """Returns the group means of the trained reward and of the judge's sum, over the responses that were judged.

    `rewards` has the scored responses of each group (or held-out prompt); groups without a judged response are left
    out of both, so the two are paired.
    """
    judged = [[(r.value, _judged(r, judge_weights)) for r in of_group] for of_group in rewards]
    paired = [[(value, judge) for value, judge in of_group if judge is not None] for of_group in judged]
    return {
        Quantity.REWARD: _means([[value for value, _ in of_group] for of_group in paired]),
        Quantity.JUDGE: _means([[judge for _, judge in of_group] for of_group in paired]),
    }


def _judged(reward: Reward, weights: Mapping[str, float]) -> float | None:
    parts = [weight * reward.components[name] for name, weight in weights.items() if name in reward.components]
    return math.fsum(parts) if parts else None


def repeated_words(text: str, ngram: int) -> float:
    """1 - distinct n-grams of words / n-grams; 0 for fewer than `ngram` + 1 words."""
    words = text.split()
    num = len(words) - ngram + 1
    return 1 - len({tuple(words[i : i + ngram]) for i in range(num)}) / num if num > 1 else 0.0


def script_mix(text: str) -> float:
    """Share of the letters outside the most frequent script (Unicode names: LATIN, CYRILLIC, CJK, ...)."""
    scripts = Counter(script for character in text if (script := _script(character)))
    total = sum(scripts.values())
    return 1 - max(scripts.values()) / total if total else 0.0


@lru_cache(maxsize=65_536)
def _script(character: str) -> str:
    return unicodedata.name(character, "").partition(" ")[0] if character.isalpha() else ""


def metrics_of(values: StepValues) -> dict[str, float]:
    """Returns the metrics of a step: mean and standard error of each quantity, and the numbers of groups."""
    metrics: dict[str, float] = {}
    for quantity, moments in values.moments.items():
        metrics |= {f"guard_{quantity}": moments.mean, f"guard_{quantity}_se": moments.standard_error}
        if quantity is Quantity.JUDGE:
            metrics[GROUPS] = float(moments.num)
        elif quantity in TEXTS:
            metrics[TEXT_GROUPS] = float(moments.num)
    return metrics


def recorded_values(record: StepRecord) -> StepValues:
    """The inverse of `metrics_of`, from the record of a step; without moments for a step of a run without a guard."""
    values, moments = record.values, {}
    for quantity in Quantity:
        if f"guard_{quantity}" not in values:
            continue
        num = values[_num_of(quantity)]
        moments[quantity] = Moments.from_error(int(num), values[f"guard_{quantity}"], values[f"guard_{quantity}_se"])
    return StepValues(record.step, moments)


def _num_of(quantity: Quantity) -> str:
    if quantity in (Quantity.REWARD, Quantity.JUDGE):
        return GROUPS
    return TEXT_GROUPS if quantity in TEXTS else "num_groups"


def _means(groups: Sequence[Sequence[float]]) -> list[float]:
    """Means of the groups that have a value."""
    return [math.fsum(values) / len(values) for values in groups if values]

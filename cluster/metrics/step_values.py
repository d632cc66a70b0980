"""Computes the numbers of one step from the metadata of its groups, without fetching tensors."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from mobula.cluster.metrics.definitions import MetricName

if TYPE_CHECKING:
    from mobula.cluster.records.trajectory import Reward, ScoredGroup
    from mobula.cluster.roles import ReplayStats


def step_values(
    groups: Sequence[ScoredGroup], replay: ReplayStats, staleness: dict[int, int], total_s: float
) -> dict[str, float]:
    """Returns rewards, lengths, ages, throughput and queue of one step that took `total_s` seconds."""
    summaries = [group.summary for group in groups]
    num_samples = sum(s.num_trajectories for s in summaries)
    num_tokens = sum(s.num_tokens for s in summaries)
    return {
        **_reward_values(groups),
        MetricName.NUM_GROUPS: float(len(groups)),
        MetricName.NUM_SAMPLES: float(num_samples),
        MetricName.NUM_TOKENS: float(num_tokens),
        MetricName.SAMPLES_PER_S: num_samples / total_s if total_s > 0 else math.nan,
        MetricName.TOKENS_PER_S: num_tokens / total_s if total_s > 0 else math.nan,
        MetricName.RESPONSE_LENGTH: num_tokens / num_samples,
        MetricName.TRUNCATED_FRACTION: sum(s.num_truncated for s in summaries) / num_samples,
        MetricName.MEDIA_BYTES_REFERENCED: float(sum(s.num_media_bytes * s.num_trajectories for s in summaries)),
        MetricName.BYTES_PER_TRAJECTORY: sum(s.num_bytes for s in summaries) / num_samples,
        MetricName.STALENESS: sum(lag * n for lag, n in staleness.items()) / max(1, sum(staleness.values())),
        MetricName.STALENESS_MAX: float(max(staleness, default=0)),
        MetricName.QUEUE_READY: float(replay.num_ready),
        MetricName.QUEUE_TAKEN: float(replay.num_taken),
        MetricName.QUEUE_BYTES: float(replay.num_bytes),
        MetricName.QUEUE_OLDEST_AGE_S: replay.oldest_age_s,
        MetricName.QUEUE_WAITING: float(replay.num_waiting),
        MetricName.QUEUE_OVERSIZED: float(replay.num_oversized),
    }


def staleness_of(groups: Sequence[ScoredGroup], *, trained_version: int) -> dict[int, int]:
    """Returns lag -> generated tokens; the lag of a token is `trained_version` minus the version that sampled it."""
    tokens: Counter[int] = Counter()
    for group in groups:
        for version, num_tokens in group.summary.tokens_by_version.items():
            tokens[trained_version - version] += num_tokens
    return dict(sorted(tokens.items()))


def component_means(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Returns each reward component's mean over the responses that have it."""
    totals: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for group in groups:
        for reward in group.scored_rewards:
            totals.update(reward.components)
            counts.update(reward.components.keys())
    return {name: totals[name] / counts[name] for name in totals}


def sampled_values(groups: Sequence[Sequence[Reward | None]], accuracy_component: str) -> dict[str, float]:
    """Returns means over all sampled groups, trained or rejected, and the shares of groups with equal rewards. `groups`
    has the rewards of each group; None for a response without a reward.

    A group with equal rewards is right or wrong by the component of accuracy; without it, by a reward above 0.
    """
    right = wrong = 0
    scored = [[reward for reward in group if reward is not None] for group in groups]
    for rewards in scored:
        if len({reward.value for reward in rewards}) == 1:
            marks = [_accuracy(reward, accuracy_component) for reward in rewards]
            is_right = math.fsum(marks) >= RIGHT_FROM * len(marks)
            right, wrong = right + is_right, wrong + (not is_right)
    every = [reward for rewards in scored for reward in rewards]
    marks = [reward.components[accuracy_component] for reward in every if accuracy_component in reward.components]
    return {
        MetricName.SAMPLED_REWARD_MEAN: math.fsum(reward.value for reward in every) / len(every),
        **({MetricName.SAMPLED_ACCURACY: math.fsum(marks) / len(marks)} if marks else {}),
        MetricName.NUM_SAMPLED_GROUPS: float(len(groups)),
        MetricName.UNSCORED_FRACTION: 1 - len(every) / sum(map(len, groups)),
        MetricName.UNIFORM_FRACTION: (right + wrong) / len(groups),
        MetricName.UNIFORM_RIGHT_FRACTION: right / len(groups),
        MetricName.UNIFORM_WRONG_FRACTION: wrong / len(groups),
    }


def correlations(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Returns Pearson correlations within groups, as the policy gradient sees them: `length` of the reward with the
    number of tokens, `NAME` of the reward with a component, `NAME/NAME` of two components. Columns that do not vary
    within any group have none."""
    columns: dict[str, list[float]] = {}
    rows = list(_centred_rows(groups))
    for name in dict.fromkeys(name for row in rows for name in row):
        columns[name] = [row[name] if name in row else 0.0 for row in rows]
    columns = {name: values for name, values in columns.items() if any(abs(value) > TINY for value in values)}
    if REWARD not in columns:
        return {}
    others = [name for name in columns if name != REWARD]
    found = {name: _cosine(columns[REWARD], columns[name]) for name in others}
    components = [name for name in others if name != LENGTH][:MAX_CORRELATED]
    return found | {f"{a}/{b}": _cosine(columns[a], columns[b]) for a, b in combinations(components, 2)}


def reasons_of(groups: Sequence[ScoredGroup]) -> Counter[str]:
    """Returns `component: reason` -> responses whose component is not above 0. Digits are replaced and reasons cut,
    so that few names occur."""
    return Counter(
        f"{name}: {_DIGITS.sub('#', reason)[:MAX_REASON]}"
        for group in groups
        for reward in group.scored_rewards
        for name, reason in reward.reasons.items()
        if name not in reward.components or reward.components[name] <= 0
    )


REWARD, LENGTH = "reward", "length"  # columns beside the components
RIGHT_FROM = 0.5
TINY = 1e-12
MAX_CORRELATED = 4  # components whose correlations with each other are kept
MAX_REASON = 60  # characters
_DIGITS = re.compile(r"\d+")


def _centred_rows(groups: Sequence[ScoredGroup]) -> Iterator[dict[str, float]]:
    """Yields reward, length and components of each scored response, less their means over its group."""
    for group in groups:
        rows = [
            {**reward.components, REWARD: reward.value, LENGTH: float(num_steps)}
            for reward, num_steps in zip(group.rewards, group.summary.num_steps, strict=True)
            if reward is not None
        ]
        names = dict.fromkeys(name for row in rows for name in row)
        means = {name: math.fsum(row.get(name, 0.0) for row in rows) / len(rows) for name in names}
        for row in rows:
            yield {name: value - means[name] for name, value in row.items()}


def _cosine(a: Sequence[float], b: Sequence[float]) -> float:
    left, right = np.array(a), np.array(b)
    return float(left @ right / math.sqrt((left @ left) * (right @ right)))


def _accuracy(reward: Reward, component: str) -> float:
    return reward.components[component] if component in reward.components else float(reward.value > 0)


def _reward_values(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    rewards = [reward.value for group in groups for reward in group.scored_rewards]
    mean = math.fsum(rewards) / len(rewards)
    return {
        MetricName.REWARD_MEAN: mean,
        MetricName.REWARD_STD: math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)),
        MetricName.REWARD_MAX: max(rewards),
        MetricName.REWARD_MIN: min(rewards),
    }

"""Computes the numbers of one step from the metadata of its groups, without fetching tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mobula.cluster.metrics.definitions import MetricName

if TYPE_CHECKING:
    from mobula.cluster.records.trajectory import ScoredGroup
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


def _reward_values(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    rewards = [reward.value for group in groups for reward in group.scored_rewards]
    mean = math.fsum(rewards) / len(rewards)
    uniform = sum(len({reward.value for reward in group.scored_rewards}) == 1 for group in groups)
    return {
        MetricName.REWARD_MEAN: mean,
        MetricName.REWARD_STD: math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)),
        MetricName.REWARD_MAX: max(rewards),
        MetricName.REWARD_MIN: min(rewards),
        MetricName.UNIFORM_FRACTION: uniform / len(groups),
    }

"""The last line of a run: held-out accuracy before and after."""

from __future__ import annotations

from collections.abc import Callable

from mobula.cluster.metrics.definitions import MetricName
from mobula.cluster.metrics.summary import Summary
from mobula.configs.schema import RunConfig

NAMES = {"sft": "whole answers correct", "dpo": "pairs in order", "reward_model": "pairs or labels in order"}


def headline(config: RunConfig, summary: Summary) -> str:
    """Formats the accuracy before and after; for `sft` also the share of correct tokens. Evaluations that cannot be
    compared are not shown as a pair."""
    phase = "training" if config.offline.is_on else "RL"
    start = "after the warm start" if config.warm_start.num_steps else f"before {phase}"

    def change(name: str, before: float | None, after: float | None, write: Callable[[float | None], str]) -> str:
        then, now = (f" ({n})" if " of " in n else "" for n in (summary.counted_before, summary.counted_after))
        if summary.not_compared:
            return f"{name} {write(after)} after {phase}{now}"
        return f"{name} {write(before)} {start}{then}, {write(after)} after {phase}{now}"

    before, after = summary.accuracy_before, summary.accuracy_after
    if all(value is None or 0 <= value <= 1 for value in (before, after)):
        lines = [change(f"held-out {NAMES.get(config.offline.job, 'accuracy')}", before, after, _percent)]
    else:
        lines = [change(f"held-out mean of {config.rewards.accuracy_component}", before, after, _number)]
    key = MetricName.TOKEN_ACCURACY
    shares = (summary.values_before.get(key), summary.values_after.get(key))
    if any(share is not None for share in shares):
        lines.append(change("tokens correct", *shares, _percent))
    if summary.not_compared:
        lines.append(f"not compared with the start, since {summary.not_compared}")
    return "; ".join(lines)


def _percent(share: float | None) -> str:
    return "not measured" if share is None else f"{share:.1%}"


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3g}"

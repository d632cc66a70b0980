"""Cost: a penalty for responses over a budget of tokens and of time."""

from __future__ import annotations

import math
from numbers import Real

from mobula.cluster.errors import RewardError
from mobula.rewards.contract import RewardRequest, Score
from mobula.rewards.functions.parsing.references import check_number, given_metadata
from mobula.rewards.tools import Tools


class Cost:
    """1 within the budget, minus the relative excess over each target, at least -1.

    value = 1 - max(0, tokens / `target_tokens` - 1) - max(0, latency / `latency_budget_ms` - 1). Tokens are counted in
    the response; the latency is `latency_ms` of the metadata. `latency_budget_ms=None` counts tokens only. The
    breakdown has both excesses.

    Raises:
        RewardError: `latency_budget_ms` is set and the metadata has no latency.
    """

    def __init__(self, tools: Tools, *, target_tokens: int, latency_budget_ms: float | None) -> None:
        check_number("target_tokens", target_tokens, low=1)
        if latency_budget_ms is not None:
            check_number("latency_budget_ms", latency_budget_ms, low=1)
        self._target_tokens = target_tokens
        self._latency_budget_ms = latency_budget_ms

    def __call__(self, request: RewardRequest) -> Score:
        parts = {"token_excess": max(0.0, request.response.num_tokens / self._target_tokens - 1)}
        if self._latency_budget_ms is not None:
            latency_ms = given_metadata(request.metadata, "latency_ms")
            if not isinstance(latency_ms, Real) or not math.isfinite(latency_ms) or latency_ms < 0:
                raise RewardError(f"metadata.latency_ms={latency_ms!r} is no time in milliseconds")
            parts["latency_excess"] = max(0.0, float(latency_ms) / self._latency_budget_ms - 1)
        over = [name.removesuffix("_excess") for name, excess in parts.items() if excess]
        reason = f"over budget: {', '.join(over)}" if over else ""
        return Score(max(-1.0, 1 - math.fsum(parts.values())), reason, parts)

"""Environment: the rewards of the environment of an episode, discounted by turn."""

from __future__ import annotations

from mobula.cluster.errors import RewardError
from mobula.rewards.contract import RewardRequest, Score
from mobula.rewards.functions.parsing.references import check_number
from mobula.rewards.tools import Tools


class EnvironmentReward:
    """sum over turns k of discount^k r_k. A failed episode has no score: 0 would be trained on."""

    def __init__(self, tools: Tools, *, discount: float) -> None:
        check_number("discount", discount, low=0, high=1)
        self._discount = discount

    def __call__(self, request: RewardRequest) -> Score:
        response = request.response
        if response.failure:
            raise RewardError(f"the episode failed: {response.failure}")
        if not response.turns:
            raise RewardError("the response is no episode: set environment=OPTION, or leave this component out")
        parts: dict[str, float] = {}
        for number, turn in enumerate(response.turns):
            for name, value in turn.rewards.items():
                parts[name] = parts.get(name, 0.0) + self._discount**number * value
        return Score(sum(parts.values()), f"{len(response.turns)} turns", parts)

"""The reward of an episode is the discounted sum of its turns, and a failed one has none."""

from __future__ import annotations

import pytest

from mobula.cluster.errors import RewardError
from mobula.cluster.records.trajectory import EpisodeTurn, Response
from mobula.rewards.contract import RewardRequest
from mobula.rewards.functions.environment import EnvironmentReward


def request(*rewards: dict[str, float], failure: str = "") -> RewardRequest:
    turns = tuple(EpisodeTurn(n, n + 1, "go", "", parts, "none") for n, parts in enumerate(rewards))
    return RewardRequest(Response("go", 1, False, turns=turns, failure=failure), (), {}, "")


def test_turns_are_discounted_and_parts_are_shown() -> None:
    score = EnvironmentReward(None, discount=0.5)(request({"a": 1.0}, {"a": 2.0, "b": 3.0}, {"b": 4.0}))
    assert score.value == 1.0 + 0.5 * 5.0 + 0.25 * 4.0
    assert score.breakdown == {"a": 2.0, "b": 2.5}


def test_a_failed_episode_is_not_worth_zero() -> None:
    with pytest.raises(RewardError, match="timed_out"):
        EnvironmentReward(None, discount=1.0)(request({"a": 1.0}, failure="timed_out: waited 3 s"))


def test_a_response_of_one_turn_is_refused() -> None:
    with pytest.raises(RewardError, match="no episode"):
        EnvironmentReward(None, discount=1.0)(request())

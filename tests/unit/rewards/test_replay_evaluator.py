"""Recorded responses scored again: what differs is found, component by component."""

from __future__ import annotations

from collections.abc import Sequence

from fakes import make_group, make_prompt

from mobula.cluster.records.arrow import RecordedGroup
from mobula.cluster.records.trajectory import Reward
from mobula.rewards.contract import FailureKind, RewardRequest
from mobula.rewards.pool.replay_evaluator import rescore
from mobula.rewards.recipes import ComponentError


class Fixed:
    """Scores one group after the other."""

    def __init__(self, *rewards: tuple[Reward | None, ...]) -> None:
        self._rewards = iter(rewards)

    def rewards(self, requests: Sequence[RewardRequest]) -> list[Reward | ComponentError]:
        failure = ComponentError("accuracy", FailureKind.FAILED, "no reference")
        return [failure if reward is None else reward for reward in next(self._rewards)]


def recorded(group_id: str, *rewards: Reward | None) -> RecordedGroup:
    return RecordedGroup(make_group(make_prompt(group_id)), rewards)


def test_the_same_functions_change_nothing() -> None:
    rewards = (Reward(1.0, {"accuracy": 1.0}), Reward(0.0, {"accuracy": 0.0}))
    result = rescore(Fixed(rewards), [recorded("a", *rewards)])
    assert {name: d.num_changed for name, d in result.differences.items()} == {"accuracy": 0, "reward": 0}
    assert result.differences["accuracy"].mean_now == result.differences["accuracy"].mean_then == 0.5


def test_what_differs_is_counted_by_component() -> None:
    then = (Reward(1.5, {"accuracy": 1.0, "format": 0.5}), Reward(0.5, {"accuracy": 0.0, "format": 0.5}))
    now = (Reward(0.25, {"accuracy": 0.0, "length": 9.0}), Reward(0.75, {"accuracy": 0.0, "length": 3.0}))
    result = rescore(Fixed(now, then), [recorded("a", *then), recorded("b", *then)])
    accuracy, total = result.differences["accuracy"], result.differences["reward"]
    assert (accuracy.mean_then, accuracy.mean_now, accuracy.num_changed, accuracy.largest_change) == (0.5, 0.25, 1, 1.0)
    assert (len(total.pairs), total.num_changed, total.largest_change) == (4, 2, 1.25)
    assert result.not_compared == {"format", "length"}
    assert result.num_responses == 4


def test_a_response_that_cannot_be_scored_is_counted_and_not_compared() -> None:
    reward = Reward(1.0, {"accuracy": 1.0})
    result = rescore(Fixed((None, reward)), [recorded("a", reward, None)])
    assert (result.num_unscored_then, result.num_unscored_now, result.differences) == (1, 1, {})

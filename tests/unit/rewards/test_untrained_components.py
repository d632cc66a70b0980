"""Components with trained=false: measured as a judge, never part of the reward."""

from __future__ import annotations

import pytest
from reward_data import component, component_of, rewards_of

from mobula.cluster.records.trajectory import Response, Reward
from mobula.configs.rules.data import reward_contradictions
from mobula.configs.schema import Gate, Recipe, RewardsConfig
from mobula.rewards.components import RecipeBook, RewardScoring, is_judged
from mobula.rewards.contract import FailureKind, RewardRequest, Score, ScoringFailure
from mobula.rewards.isolation.process import IsolatedProcess, Tools

LOOSE = component("loose", "exact_match", 0.5, ignore_case=True, whole_response=False)
JUDGE = component_of(
    "exact", "exact_match", weight=2.0, trained=False, options={"ignore_case": True, "whole_response": True}
)
REWARDS = rewards_of(LOOSE, JUDGE)


def test_a_judge_is_measured_and_not_rewarded() -> None:
    tools = Tools(IsolatedProcess(timeout_s=1, start_timeout_s=1), "cpu", "float32")
    requests = [RewardRequest(Response(text, 1, False), ("7",), {}, "?", ()) for text in ("7", "is it 7")]
    exact, loose = RewardScoring(REWARDS, None, tools).rewards(requests)
    assert isinstance(exact, Reward)
    assert isinstance(loose, Reward)
    assert (exact.value, loose.value) == (0.5, 0.5)
    assert (exact.components["exact"], loose.components["exact"]) == (1.0, 0.0)
    assert REWARDS.judge_weights == {"exact": 2.0}
    assert REWARDS.weights_in(REWARDS.active_recipes["default"]) == {"loose": 0.5, "exact": 0.0}


def test_a_judge_that_fails_or_does_not_run_costs_no_reward() -> None:
    book = RecipeBook(REWARDS)
    failure = ScoringFailure(FailureKind.TIMED_OUT, "no reply")
    failed = book.reward("default", {"loose": Score(1.0), "exact": failure})
    assert (failed.value, failed.components) == (0.5, {"loose": 1.0})
    assert "no reply" in failed.reasons["exact"]
    assert book.judge_failures({"loose": Score(1.0), "exact": failure}) == {"exact": failure}
    assert book.reward("default", {"loose": Score(1.0)}) == Reward(0.5, {"loose": 1.0}, {})


def test_judges_score_every_so_many_th_training_prompt_and_all_held_out_ones() -> None:
    recipe = RecipeBook(REWARDS).find("default")
    assert recipe is not None
    assert recipe.wants("loose", {}, is_judged=False)
    assert not recipe.wants("exact", {}, is_judged=False)
    training = [f"2/{position}/row" for position in range(6)]
    assert [is_judged(prompt, 1) for prompt in training] == [True] * 6
    assert [is_judged(prompt, 3) for prompt in training] == [True, False, False] * 2
    assert [is_judged(prompt, 0) for prompt in training] == [False] * 6
    assert is_judged("test-17", 0)


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (rewards_of(JUDGE), "none is trained with a weight"),
        (rewards_of(LOOSE, JUDGE.model_copy(update={"weight": 0.0})), "exact with trained=false and weight=0"),
        (
            rewards_of(LOOSE, JUDGE, recipes={"a": Recipe(components=("loose", "exact"), weights={"exact": 1.0})}),
            "rewards.recipes.a weighs or needs exact, whose trained=false",
        ),
        (
            rewards_of(
                LOOSE,
                JUDGE,
                recipes={
                    "a": Recipe(
                        components=("loose", "exact"),
                        gates=(Gate(component="loose", needs="exact", at_least=1),),
                    )
                },
                accuracy_component="exact",
            ),
            "rewards.recipes.a weighs or needs exact, whose trained=false",
        ),
    ],
)
def test_a_judge_that_would_count_or_would_not_is_refused(rewards: RewardsConfig, message: str) -> None:
    assert message in "\n".join(reward_contradictions(rewards))

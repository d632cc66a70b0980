"""Components and recipes: labels, gates, weights, what is scored once, and components that are measured only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from reward_data import TOOLS, component, component_of, rewards_of

from mobula.cluster.errors import RewardError
from mobula.cluster.records.trajectory import Response, Reward
from mobula.configs.rules.data import reward_contradictions
from mobula.configs.schema import Gate, Recipe, RewardsConfig
from mobula.rewards.components import Component, ComponentError, RecipeBook, RewardScoring, content_key, is_judged
from mobula.rewards.contract import FailureKind, RewardRequest, Score, ScoringFailure


def recipe(*components: str, **changes: Any) -> Recipe:
    return Recipe(**{"components": components, "weights": {}, "gates": (), "normalise": False, **changes})


def config(**recipes: Recipe) -> RewardsConfig:
    exact = {"ignore_case": True, "whole_response": False}
    return rewards_of(
        component("right", "exact_match", **exact),
        component("boxed", "format", 0.5, preset="boxed"),
        component("tags", "format", 0.25, preset="think_answer"),
        recipes=recipes,
    )


def request(text: str, images: tuple[bytes, ...] = (), **metadata: Any) -> RewardRequest:
    return RewardRequest(Response(text, 1, False), ("7",), metadata, "?", images)


def scored(rewards: RewardsConfig, *requests: RewardRequest) -> list[Reward | ComponentError]:
    return RewardScoring(rewards, None, TOOLS).rewards(requests)


def values(rewards: Sequence[Reward | ComponentError]) -> list[float]:
    assert all(isinstance(reward, Reward) for reward in rewards), rewards
    return [reward.value for reward in rewards]


def test_the_label_chooses_the_recipe_and_components_run_only_where_they_are_needed() -> None:
    rewards = config(default=recipe("right"), shape=recipe("right", "boxed", weights={"boxed": 2.0, "right": 0.0}))
    text = r"\boxed{7}"
    plain, other, shaped = scored(rewards, request(text), request(text, label="unknown"), request(text, label="shape"))
    assert (plain.value, plain.components) == (1.0, {"right": 1.0})
    assert other == plain
    assert (shaped.value, shaped.components) == (2.0, {"right": 1.0, "boxed": 1.0})


def test_a_label_without_a_recipe_is_a_failure_with_a_name_never_a_zero() -> None:
    [error] = scored(config(geometry=recipe("right")), request("7", label="algebra"))
    assert isinstance(error, ComponentError)
    assert (error.component, error.kind) == ("recipe", FailureKind.FAILED)
    assert "'algebra' (there is geometry)" in error.reason


def test_gates_open_one_after_the_other_whatever_the_order_of_components() -> None:
    gates = (Gate(component="right", needs="boxed", at_least=1.0), Gate(component="boxed", needs="tags", at_least=1.0))
    recipes = {"default": recipe("right", "boxed", "tags", gates=gates)}
    rewards = rewards_of(*config().components, accuracy_component="tags", recipes=recipes)
    assert rewards.gate_order() == ("tags", "boxed", "right")
    text = "<think>so</think><answer>7</answer>"
    [reward] = scored(rewards, request(text))
    assert reward.components == {"tags": 1.0, "boxed": 0.0}
    assert reward.reasons["right"] == "not run: boxed is below 1"


def test_a_normalised_sum_is_divided_by_all_weights_run_or_not() -> None:
    gate = Gate(component="boxed", needs="right", at_least=1.0)
    rewards = config(default=recipe("right", "boxed", weights={"boxed": -3.0}, gates=(gate,), normalise=True))
    assert values(scored(rewards, request(r"\boxed{7}"), request("7"), request("8"))) == [(1 - 3) / 4, 1 / 4, 0.0]


@pytest.mark.parametrize("weights", [{"right": 1e308, "boxed": 1e308}, {"right": 1.7e308, "boxed": 10.0}])
def test_a_sum_that_is_not_finite_is_no_reward(weights: dict[str, float]) -> None:
    book = RecipeBook(config(default=recipe("right", "boxed", weights=weights)))
    with pytest.raises(ComponentError, match="no float holds the weighted sum") as refused:
        book.reward("default", {"right": Score(10.0), "boxed": Score(1e307)})
    assert refused.value.kind is FailureKind.NOT_FINITE


@pytest.mark.parametrize(
    ("recipes", "message"),
    [
        ({"a": recipe("right", "nope")}, "rewards.recipes.a.components names nope: use right, boxed, tags"),
        ({"a": recipe("right", weights={"boxed": 1.0})}, "weights and gates name boxed"),
        (
            {"a": recipe("boxed"), "b": recipe("tags")},
            "no recipe of rewards.recipes has right, whose mean is the accuracy",
        ),
        ({"a": recipe("right", weights={"right": 0.0})}, "gives no component a weight"),
        (
            {"a": recipe("right", "boxed", gates=(Gate(component="right", needs="boxed", at_least=1.0),))},
            "but the accuracy is of all responses of a label",
        ),
        (
            {
                "a": recipe("right", "boxed", "tags", gates=(Gate(component="boxed", needs="tags", at_least=1.0),)),
                "b": recipe("right", "boxed", "tags", gates=(Gate(component="tags", needs="boxed", at_least=1.0),)),
            },
            "go round in a circle .*: remove one of them",
        ),
    ],
)
def test_recipes_that_cannot_work_are_refused_with_the_next_action(recipes: dict[str, Recipe], message: str) -> None:
    assert any(re.search(message, found) for found in reward_contradictions(config(**recipes)))


def test_services_that_wait_for_each_other_are_refused() -> None:
    gates = (Gate(component="a2", needs="b1", at_least=0.0), Gate(component="b1", needs="a1", at_least=0.0))
    parts = [component_of(name, "format", service=service) for name, service in (("a1", "a"), ("a2", "a"), ("b1", "b"))]
    rewards = rewards_of(*parts, recipes={"default": recipe("a1", "a2", "b1", gates=gates)})
    assert [m for m in reward_contradictions(rewards) if "one service run both" in m]


class Counted:
    """Answers with the length of a text; counts how often it is asked, and fails the first few times."""

    def __init__(self, num_failures: int = 0) -> None:
        self.asked: list[str] = []
        self._num_failures = num_failures

    def score_batch(self, requests: Sequence[RewardRequest]) -> list[float | ScoringFailure]:
        self.asked += [r.response.text for r in requests]
        if self._num_failures:
            self._num_failures -= 1
            raise RewardError("the server is not there yet")
        return [float(len(r.response.text)) for r in requests]


def test_equal_content_is_scored_once_and_the_least_recent_is_forgotten() -> None:
    function = Counted()
    part = Component("length", function, retries=0, cache_entries=2)
    assert part.evaluate([request("a"), request("bb"), request("a")]) == [Score(1.0), Score(2.0), Score(1.0)]
    assert function.asked == ["a", "bb"]
    part.evaluate([request("ccc"), request("a")])
    assert function.asked == ["a", "bb", "ccc"]
    part.evaluate([request("bb")])
    assert function.asked == ["a", "bb", "ccc", "bb"], "it had been forgotten"
    assert part.num_cache_hits == 2


def test_what_any_reward_function_could_tell_apart_is_not_equal() -> None:
    base = request("a", (b"1", b"2"), label="x")
    others = [request("b", (b"1", b"2"), label="x"), request("a", (b"12",), label="x"), request("a", (b"1", b"2"))]
    longer = RewardRequest(
        Response("a", 2, False), base.references, base.metadata, base.prompt_text, base.prompt_images
    )
    assert len({content_key(r) for r in (base, *others, longer)}) == 5
    assert content_key(base) == content_key(request("a", (b"1", b"2"), label="x"))


def test_what_failed_is_tried_again_and_only_that() -> None:
    function = Counted(num_failures=2)
    assert Component("length", function, retries=2, cache_entries=0).evaluate([request("a")]) == [Score(1.0)]
    function = Counted(num_failures=2)
    [outcome] = Component("length", function, retries=1, cache_entries=8).evaluate([request("a")])
    assert outcome == ScoringFailure(FailureKind.FAILED, "the server is not there yet")


def test_a_failure_is_not_remembered() -> None:
    part = Component("length", Counted(num_failures=1), retries=0, cache_entries=8)
    assert isinstance(part.evaluate([request("a")])[0], ScoringFailure)
    assert part.evaluate([request("a")]) == [Score(1.0)]


def test_the_book_of_a_run_reads_the_label_from_the_configured_key() -> None:
    rewards = rewards_of(component("right", "exact_match"), label_key="task")
    assert [RecipeBook(rewards).label(metadata) for metadata in ({"task": 3}, {"label": "x"})] == ["3", "default"]


LOOSE = component("loose", "exact_match", 0.5, ignore_case=True, whole_response=False)

JUDGE = component_of(
    "exact", "exact_match", weight=2.0, trained=False, options={"ignore_case": True, "whole_response": True}
)

REWARDS = rewards_of(LOOSE, JUDGE)

NEEDS_EXACT = Gate(component="loose", needs="exact", at_least=1)


def test_a_judge_is_measured_and_not_rewarded() -> None:
    exact, loose = scored(REWARDS, request("7"), request("is it 7"))
    assert values([exact, loose]) == [0.5, 0.5]
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
            rewards_of(LOOSE, JUDGE, recipes={"a": recipe("loose", "exact", weights={"exact": 1.0})}),
            "rewards.recipes.a weighs or needs exact, whose trained=false",
        ),
        (
            rewards_of(LOOSE, JUDGE, recipes={"a": recipe("loose", "exact", gates=(NEEDS_EXACT,))}),
            "rewards.recipes.a weighs or needs exact, whose trained=false",
        ),
    ],
)
def test_a_judge_that_would_count_or_would_not_is_refused(rewards: RewardsConfig, message: str) -> None:
    assert message in "\n".join(reward_contradictions(rewards))

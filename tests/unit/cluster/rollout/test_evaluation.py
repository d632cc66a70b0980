"""Held-out evaluation: schedule, means, interval, and what could not be scored."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from fakes import SETTINGS, FakeRewards, FakeRollouts, make_prompt

from mobula.cluster.errors import RewardError, RolloutError
from mobula.cluster.metrics.step_records import HELD_OUT
from mobula.cluster.records.trajectory import Reward
from mobula.cluster.rollout.evaluation import (
    EvaluationResult,
    EvaluationSchedule,
    Evaluator,
    ScoredPrompt,
    Suite,
    mean_of_component,
)

ONE = replace(SETTINGS, temperature=0.0, num_samples=1)


def make_evaluator(
    rollouts: FakeRollouts,
    results: list[EvaluationResult],
    values: Callable[[str], Sequence[float | None]] = lambda prompt_id: (0.0, 1.0),
    *,
    accuracy_component: str = "accuracy",
    interval_steps: int = 0,
) -> Evaluator:
    return Evaluator(
        suites=[Suite(HELD_OUT, [make_prompt(f"test/{i}/s{i}") for i in range(10)], ONE)],
        rollouts=rollouts,
        rewards=FakeRewards(values),
        accuracy_component=accuracy_component,
        correct_from=1.0,
        max_concurrent=3,
        schedule=EvaluationSchedule(interval_steps, total_steps=7),
        on_result=results.append,
    )


async def test_accuracy_is_the_mean_over_all_held_out_prompts() -> None:
    def values(prompt_id: str) -> tuple[float, float]:
        return (1.0, 1.0) if int(prompt_id.split("/")[1]) < 7 else (0.0, 0.0)

    rollouts = FakeRollouts()
    evaluator = make_evaluator(rollouts, [], values)
    [result] = await evaluator.run(3)
    assert (result.version, result.accuracy, result.num_scored, result.num_unscored) == (3, 0.7, 20, 0)
    assert 0 < result.low < result.accuracy < result.high < 1
    assert set(rollouts.settings.values()) == {ONE}
    assert len(rollouts.settings) == 10


@pytest.mark.parametrize(
    ("of_prompt", "mean"),
    [(lambda n: 1.0 if n < 3 else -1.0, -0.4), (lambda n: float(n + 1), 5.5), (lambda n: -1.0, -1.0)],
)
async def test_rewards_of_any_range_have_a_mean_and_an_interval(of_prompt: Callable[[int], float], mean: float) -> None:
    evaluator = make_evaluator(FakeRollouts(), [], lambda prompt_id: (of_prompt(int(prompt_id.split("/")[1])),) * 2)
    [result] = await evaluator.run(0)
    assert result.accuracy == pytest.approx(mean)
    assert result.low <= result.accuracy <= result.high
    assert (result.high - result.low > 0.1) == (len({of_prompt(n) for n in range(10)}) > 1)


async def test_no_more_prompts_are_in_flight_than_allowed() -> None:
    rollouts = FakeRollouts(pauses=lambda prompt_id: 5)
    await make_evaluator(rollouts, []).run(0)
    assert rollouts.max_in_flight == 3


@pytest.mark.parametrize(("interval_steps", "due"), [(0, [0, 7]), (2, [0, 2, 4, 6, 7]), (7, [0, 7])])
async def test_it_runs_before_after_and_at_the_interval(interval_steps: int, due: list[int]) -> None:
    results: list[EvaluationResult] = []
    rollouts = FakeRollouts()
    evaluator = make_evaluator(rollouts, results, interval_steps=interval_steps)
    async with evaluator.evaluating():
        for version in range(8):
            await evaluator.finish()
            rollouts.version = version
            await evaluator.maybe_run(version)
    assert [result.version for result in results] == due


async def test_a_version_that_was_evaluated_before_a_resume_is_not_evaluated_again() -> None:
    first, results = make_evaluator(FakeRollouts(), []), []
    async with first.evaluating():
        await first.maybe_run(0)
    second = make_evaluator(FakeRollouts(), results)
    second.restore(0, first.state())
    async with second.evaluating():
        await second.maybe_run(0)
    assert results == []
    assert second.results == first.results


async def test_it_runs_beside_the_body_until_it_is_waited_for_and_the_last_one_is() -> None:
    results: list[EvaluationResult] = []
    rollouts = FakeRollouts(pauses=lambda prompt_id: 3)
    evaluator = make_evaluator(rollouts, results)
    async with evaluator.evaluating():
        await evaluator.maybe_run(0)
        assert results == []
        while not rollouts.num_in_flight:
            await asyncio.sleep(0)
        await evaluator.finish()
        assert [result.version for result in results] == [0]
        rollouts.version = 7
        await evaluator.maybe_run(7)
        assert [result.version for result in results] == [0, 7], "a checkpoint of the last version holds its result"


async def test_it_takes_nothing_older_than_the_push_that_is_still_under_way() -> None:
    results: list[EvaluationResult] = []
    rollouts = FakeRollouts()
    rollouts.version = 1
    evaluator = make_evaluator(rollouts, results, interval_steps=2)
    async with asyncio.timeout(5), evaluator.evaluating():
        await evaluator.maybe_run(2)
        await asyncio.sleep(0.01)
        assert rollouts.num_in_flight == 3 and results == []
        rollouts.version = 2
        await evaluator.finish()
    assert [(result.version, result.num_unscored) for result in results] == [(2, 0)]


async def test_one_that_fails_cancels_the_body_and_one_that_runs_is_cancelled_with_it() -> None:
    rollouts = FakeRollouts(fault=lambda prompt_id, attempt: RolloutError(prompt_id))
    with pytest.raises(RolloutError, match="test/"):
        failing = make_evaluator(rollouts, [])
        async with asyncio.timeout(5), failing.evaluating():
            await failing.maybe_run(0)
            await asyncio.Event().wait()
    endless = FakeRollouts(pauses=lambda prompt_id: 10**9)
    evaluator = make_evaluator(endless, [])
    with pytest.raises(KeyError):
        async with asyncio.timeout(5), evaluator.evaluating():
            await evaluator.maybe_run(0)
            while not endless.num_in_flight:
                await asyncio.sleep(0)
            raise KeyError("the learner failed")
    assert endless.num_in_flight == 0


async def test_a_response_of_newer_weights_is_left_out() -> None:
    rollouts = FakeRollouts(pauses=lambda prompt_id: 2)
    running = asyncio.ensure_future(make_evaluator(rollouts, []).run(0))
    while sum(rollouts.attempts.values()) < 6:
        await asyncio.sleep(0)
    rollouts.version = 1
    [result] = await running
    assert result.num_scored + result.num_unscored == 20
    assert 0 < result.num_unscored < 20


async def test_what_could_not_be_scored_is_left_out_and_counted() -> None:
    [result] = await make_evaluator(FakeRollouts(), [], lambda prompt_id: (1.0, None)).run(0)
    assert (result.accuracy, result.num_scored, result.num_unscored) == (1.0, 10, 10)


async def test_an_evaluation_without_any_score_is_an_error() -> None:
    with pytest.raises(RewardError, match="none of 20 responses could be scored"):
        await make_evaluator(FakeRollouts(), [], lambda prompt_id: (None, None)).run(0)


async def test_an_accuracy_component_that_no_held_out_response_has_names_those_that_it_has() -> None:
    with pytest.raises(RewardError, match=r"accuracy_component=correct is in no recipe of the 20 .*\['accuracy'\]"):
        await make_evaluator(FakeRollouts(), [], accuracy_component="correct").run(0)


def test_the_accuracy_is_of_the_responses_whose_recipe_has_its_component() -> None:
    rewards = [
        Reward(1.0, {"accuracy": 1.0}),
        Reward(0.5, {"boxes": 0.5}),
        Reward(0.5, {"accuracy": 0.5, "boxes": 0.5}),
    ]
    assert mean_of_component("accuracy", rewards) == (0.75, 2)


async def test_a_failing_rollout_ends_the_evaluation_as_itself() -> None:
    rollouts = FakeRollouts(fault=lambda prompt_id, attempt: RolloutError(prompt_id) if "/4/" in prompt_id else None)
    with pytest.raises(RolloutError, match="test/4/s4"):
        await make_evaluator(rollouts, []).run(0)
    assert rollouts.num_in_flight == 0


async def test_suites_are_evaluated_beside_the_runs_own_with_their_own_settings() -> None:
    """Two responses to each prompt, of which the first is right on every second prompt: pass@1 0.25, pass@2 0.5."""

    def values(prompt_id: str) -> tuple[float, float]:
        return (float(int(prompt_id.split("/")[1]) % 2), 0.0)

    rollouts = FakeRollouts()
    sampled = replace(SETTINGS, temperature=1.0, num_samples=2, top_p=0.9)
    own = [make_prompt(f"test/{i}/s{i}") for i in range(4)]
    other = [make_prompt(f"high:test/{i}/s{i}") for i in range(4)]
    written: list[tuple[str, int, int]] = []

    class Log:
        async def write(self, suite: str, version: int, prompts: Sequence[ScoredPrompt]) -> None:
            written.append((suite, version, len(prompts)))

    evaluator = Evaluator(
        suites=[Suite(HELD_OUT, own, replace(SETTINGS, temperature=0.0)), Suite("high", other, sampled)],
        rollouts=rollouts,
        rewards=FakeRewards(values),
        accuracy_component="accuracy",
        correct_from=1.0,
        max_concurrent=3,
        schedule=EvaluationSchedule(0, total_steps=7),
        on_result=lambda result: None,
        responses=Log(),
    )
    held_out, high = await evaluator.run(0)
    assert (held_out.suite, high.suite) == (HELD_OUT, "high")
    assert high.accuracy == high.values["pass_at_1"] == 0.25 and high.values["pass_at_2"] == 0.5
    assert 0 <= high.low < 0.25 < high.high <= 1
    assert high.values["response_length"] > 0
    assert {rollouts.settings[prompt.prompt_id].top_p for prompt in other} == {0.9}
    assert written == [(HELD_OUT, 0, 4), ("high", 0, 4)]
    second = Evaluator(
        suites=[Suite(HELD_OUT, own, SETTINGS)],
        rollouts=rollouts,
        rewards=FakeRewards(values),
        accuracy_component="accuracy",
        correct_from=1.0,
        max_concurrent=3,
        schedule=EvaluationSchedule(0, total_steps=7),
        on_result=lambda result: None,
    )
    second.restore(0, json.loads(json.dumps(evaluator.state())))
    assert second.results == evaluator.results

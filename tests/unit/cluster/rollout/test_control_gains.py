"""The gain over controls: paired by row, at the first and the last version, kept for other runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
from fakes import SETTINGS, FakeRewards, FakeRollouts, make_prompt

from mobula.cluster.metrics.step_records import HELD_OUT, ControlGain, best_control
from mobula.cluster.metrics.summary import mcnemar, paired_interval
from mobula.cluster.rollout.evaluation import (
    OVER_CONTROL,
    EvaluationResult,
    EvaluationSchedule,
    Evaluator,
    ResultFiles,
    Suite,
)

ONE = replace(SETTINGS, temperature=0.0, num_samples=1)
LAST = 7
Values = Callable[[str, int], float]  # (suite, row) -> accuracy


class Policy:
    """Answers by suite, row and version."""

    def __init__(self, value: Callable[[str, int, int], float]) -> None:
        self._value = value
        self.version = 0
        self.asked: list[str] = []

    def values(self, prompt_id: str) -> tuple[float, float]:
        suite, _, row = prompt_id.rpartition(":")
        self.asked.append(suite)
        return (self._value(suite, int(row.split("/")[1]), self.version),) * 2


def suites(num: int = 20, *controls: str) -> list[Suite]:
    def prompts(prefix: str) -> list[Any]:
        return [make_prompt(f"{prefix}test/{n}/s{n}") for n in range(num)]

    names = {control: f"{HELD_OUT}.{control}" for control in controls}
    own = [Suite(name, prompts(f"{name}:"), ONE, {"control": c}, HELD_OUT, c) for c, name in names.items()]
    return [Suite(HELD_OUT, prompts(""), ONE, {"split": "test"}), *own]


def make(policy: Policy, results: list[EvaluationResult], of: Sequence[Suite], **changes: Any) -> Evaluator:
    parts = {"schedule": EvaluationSchedule(3, LAST), "accuracy_component": "accuracy", "correct_from": 1.0, **changes}
    rewards = FakeRewards(policy.values)
    rollouts = FakeRollouts()
    return Evaluator(suites=of, rollouts=rollouts, rewards=rewards, max_concurrent=3, on_result=results.append, **parts)


async def run(evaluator: Evaluator, policy: Policy, first: int = 0) -> None:
    async with evaluator.evaluating():
        for version in range(first, LAST + 1):
            await evaluator.finish()
            policy.version = evaluator.rollouts.version = version  # type: ignore[attr-defined]
            await evaluator.maybe_run(version)


def looks(suite: str, row: int, version: int) -> float:
    """Is right on 10 of 20 rows before and 18 after; without the image on 2, asked directly on 12."""
    if "blank" in suite:
        return float(row < 2)
    if "direct" in suite:
        return float(row < 12)
    return float(row < (18 if version else 10))


async def test_controls_are_asked_at_the_first_and_the_last_version_alone() -> None:
    policy, results = Policy(looks), list[EvaluationResult]()
    await run(make(policy, results, suites(20, "direct_prompt", "blank_image")), policy)
    asked = [(result.version, result.suite.removeprefix(f"{HELD_OUT}.")) for result in results]
    first = [(0, HELD_OUT), (0, "direct_prompt"), (0, "blank_image")]
    assert asked == [*first, (3, HELD_OUT), (6, HELD_OUT), (7, HELD_OUT), (7, "blank_image")]
    newest = next(result for result in results if (result.version, result.suite) == (7, HELD_OUT))
    direct, blank = newest.controls
    low, high = paired_interval([0.0] * 14 + [1.0] * 6)
    assert direct == ControlGain("direct_prompt", 0.6, pytest.approx(0.3), low, high, 20, 0.5, 0.5)
    assert (blank.accuracy, blank.gain, blank.before, blank.policy_before) == (0.1, pytest.approx(0.8), 0.1, 0.5)
    assert (direct.share, blank.share) == (pytest.approx(0.25), 0.0)
    assert best_control(newest.controls) == direct
    record = newest.record()
    assert (record.controls, record.values[OVER_CONTROL]) == (newest.controls, pytest.approx(0.3))


async def test_a_policy_that_does_not_look_gains_without_the_image_too() -> None:
    policy, results = Policy(lambda suite, row, version: float(row < (18 if version else 10))), []
    await run(make(policy, results, suites(20, "blank_image")), policy)
    [gain] = next(result for result in results if (result.version, result.suite) == (7, HELD_OUT)).controls
    assert (gain.gain, gain.share) == (0.0, 1.0)
    assert gain.low < 0 < gain.high


async def test_a_resume_pairs_with_the_first_version_of_the_checkpoint() -> None:
    policy, first, second = Policy(looks), list[EvaluationResult](), list[EvaluationResult]()
    of = suites(20, "direct_prompt", "blank_image")
    whole = make(policy, first, of)
    await run(whole, policy)
    state = json.loads(json.dumps(whole.state()))
    state["results"] = [row for row in state["results"] if row["version"] < LAST]
    resumed = make(policy, second, of)
    resumed.restore(6, state)
    await run(resumed, policy, first=6)
    assert [result for result in second if result.suite == HELD_OUT] == [first[-2]]


async def test_rows_that_a_control_cannot_show_are_left_out_of_the_pairs() -> None:
    policy, results = Policy(looks), list[EvaluationResult]()
    own, blank = suites(20, "blank_image")
    await run(make(policy, results, [own, replace(blank, prompts=blank.prompts[:5])]), policy)
    [gain] = results[-2].controls
    assert (gain.num, gain.accuracy, gain.gain) == (5, 0.4, pytest.approx(0.6))


async def test_what_was_measured_of_the_same_weights_is_not_sampled_again(tmp_path: Path) -> None:
    of = suites(20, "direct_prompt")
    found = []
    for weights in ("a", "a", "b"):
        policy, results = Policy(looks), list[EvaluationResult]()
        await make(policy, results, of, kept=ResultFiles(tmp_path / "kept", weights)).run(0)
        found.append(policy.asked.count(f"{HELD_OUT}.direct_prompt"))
    assert found == [20, 0, 20]
    policy = Policy(looks)
    other = [of[0], replace(of[1], identity={"control": "direct_prompt", "prompts": "other"})]
    [_, again] = await make(policy, [], other, kept=ResultFiles(tmp_path / "kept", "a")).run(0)
    assert policy.asked.count(f"{HELD_OUT}.direct_prompt") == 20 and again.identity["prompts"] == "other"


@pytest.mark.parametrize(("better", "worse", "same"), [(0, 0, 9), (6, 0, 14), (12, 5, 40), (1, 30, 2)])
def test_the_interval_of_right_and_wrong_pairs_is_that_of_half_a_pair_more_in_each_cell(
    better: int, worse: int, same: int
) -> None:
    low, high = paired_interval([1.0] * better + [-1.0] * worse + [0.0] * same)
    # Each pair counts twice, so that half a pair is one.
    table = np.array([1.0] * (2 * better + 1) + [-1.0] * (2 * worse + 1) + [0.0] * (2 * same + 2))
    expected = scipy.stats.norm.interval(0.95, table.mean(), table.std() / np.sqrt(len(table) / 2))
    assert (low, high) == pytest.approx(np.clip(expected, -1, 1), abs=1e-6)


def test_other_differences_have_students_interval() -> None:
    first, second = np.random.default_rng(0).normal(size=(2, 9))
    expected = scipy.stats.ttest_rel(first, second).confidence_interval(0.95)
    assert paired_interval(first - second) == pytest.approx((expected.low, expected.high))


@pytest.mark.parametrize("pair", [(0, 0), (5, 5), (1, 9), (20, 7), (0, 6)])
def test_the_test_of_pairs_is_the_exact_binomial_one(pair: tuple[int, int]) -> None:
    expected = scipy.stats.binomtest(pair[0], sum(pair)).pvalue if sum(pair) else 1.0
    assert mcnemar(*pair) == pytest.approx(expected)

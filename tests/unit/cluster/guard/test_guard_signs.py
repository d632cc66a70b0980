"""The signs of reward hacking on synthetic runs: false alarms, power, and the test behind them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from mobula.cluster.guard.guard import Alarm, alarms_of
from mobula.cluster.guard.signs import (
    DRIFTS,
    Divergence,
    Level,
    Moments,
    Quantity,
    Series,
    Sign,
    StepValues,
    difference,
    windows_of,
)

WINDOW = 5
NUM_STEPS = 60


def recorded(
    random: np.random.Generator, judge: Callable[[float], float], reward: Callable[[float], float], *, num_groups: int
) -> list[StepValues]:
    """A run whose groups of 8 binary judgements have the mean `judge(step)`, with prompts of different difficulty."""
    steps = []
    for step in range(1, NUM_STEPS + 1):
        logit = math.log(judge(step) / (1 - judge(step))) + random.normal(0, 1, num_groups)
        judged = random.binomial(8, 1 / (1 + np.exp(-logit))) / 8
        rewards = reward(step) + random.normal(0, 0.2, num_groups)
        values = {Quantity.REWARD: Moments.of(rewards.tolist()), Quantity.JUDGE: Moments.of(judged.tolist())}
        steps.append(StepValues(step, values))
    return steps


def alarms(steps: list[StepValues], sign: Sign, rate: float = 0.01) -> list[Alarm]:
    return alarms_of(steps, [sign], window_steps=WINDOW, false_alarm_rate=rate)


@pytest.mark.parametrize("share", [0.5, 0.95])
def test_a_judge_that_stays_gives_false_alarms_in_at_most_the_stated_share_of_runs(share: float) -> None:
    """The reward always rises, so the test of the judge alone is measured: at most the share 0.2 of 150 runs."""
    random, rate, num_runs = np.random.default_rng(0), 0.2, 150
    runs = [recorded(random, lambda step: share, lambda step: step / 20, num_groups=16) for _ in range(num_runs)]
    num = sum(bool(alarms(steps, Divergence(0.0), rate)) for steps in runs)
    # 99.9 % quantile of false alarms at the stated rate; above 0, or the test would never fire.
    assert 0 < num <= stats.binom.ppf(0.999, num_runs, rate)
    assert not any(alarms(steps, Divergence(0.1)) for steps in runs)  # the defaults


def test_a_judge_that_falls_is_found_within_three_windows_of_the_fall_and_the_moment_is_named() -> None:
    random = np.random.default_rng(1)
    found = []
    for _ in range(40):
        fallen = recorded(random, lambda step: 0.6 if step <= 20 else 0.35, lambda step: step / 20, num_groups=32)
        found.append(alarms(fallen, Divergence(0.1))[:1])
    first = [alarm for of_run in found for alarm in of_run if alarm.step <= 20 + 3 * WINDOW]
    assert len(first) >= 38, "power of at least 0.95 for a fall by 0.25 with 32 groups a step"
    assert all(alarm.agreeing <= 20 for alarm in first)
    assert np.median([alarm.agreeing for alarm in first]) >= 10


def test_a_slow_fall_is_found_by_the_pooled_windows() -> None:
    random = np.random.default_rng(2)
    steps = recorded(random, lambda step: 0.6 - 0.2 * step / NUM_STEPS, lambda step: step / 20, num_groups=64)
    assert alarms(steps, Divergence(0.1))


@pytest.mark.parametrize(
    ("judge", "reward"),
    [
        (lambda step: 0.3 + step / 120, lambda step: step / 20),  # both rise
        (lambda step: 0.8 - step / 120, lambda step: -step / 20),  # both fall: worse, but nothing is gamed
        (lambda step: 0.6, lambda step: step / 20),  # the reward alone
    ],
)
def test_other_courses_are_no_hacking(judge: Callable[[float], float], reward: Callable[[float], float]) -> None:
    random = np.random.default_rng(3)
    assert not any(alarms(recorded(random, judge, reward, num_groups=32), Divergence(0.1)) for _ in range(20))


def test_the_levels_of_all_looks_sum_to_the_false_alarm_rate() -> None:
    spent = sum(3 * Level(0.01, look).of(3) for look in range(2, 100_000))
    assert spent == pytest.approx(0.01, rel=1e-4)


def test_the_difference_is_welchs_t() -> None:
    random = np.random.default_rng(4)
    a, b = random.normal(0, 1, 20), random.normal(0.5, 3, 30)
    expected = stats.ttest_ind(b, a, equal_var=False)
    ours = difference(Moments.of(a.tolist()), Moments.of(b.tolist()))
    assert (ours.t, ours.degrees) == pytest.approx((expected.statistic, expected.df))
    assert ours.strength(expected.pvalue / 2) == pytest.approx(1.0)  # one-sided: its own level is the critical one


def test_equal_groups_differ_only_by_more_than_rounding() -> None:
    ones, tenths = Moments.of([0.1 + 0.2] * 10), Moments.of([0.3] * 10)
    assert difference(ones, tenths).t == difference(tenths, ones).t == 0
    assert difference(tenths, Moments.of([0.4] * 10)).t == math.inf


def test_windows_pool_groups_as_if_they_were_of_one_step() -> None:
    random = np.random.default_rng(5)
    parts = [random.normal(n, 1, 3 + n) for n in range(4)]
    steps = [StepValues(n, {Quantity.LENGTH: Moments.of(part.tolist())}) for n, part in enumerate(parts)]
    [window] = windows_of(steps, 4)
    whole = np.concatenate(parts)
    pooled = window.moments[Quantity.LENGTH]
    assert (window.first, window.last, pooled.num) == (0, 3, whole.size)
    assert (pooled.mean, pooled.standard_error) == pytest.approx((whole.mean(), stats.sem(whole)))
    again = Moments.from_error(pooled.num, pooled.mean, pooled.standard_error)
    assert (again.mean, again.m2) == pytest.approx((pooled.mean, pooled.m2))


@pytest.mark.parametrize(
    ("name", "limit", "quantity", "start", "inside", "outside"),
    [
        ("length", 2.0, Quantity.LENGTH, 50, 95, 130),
        ("length", 2.0, Quantity.LENGTH, 50, 30, 15),
        ("repetition", 0.2, Quantity.REPETITION, 0.1, 0.25, 0.5),
        ("language", 0.1, Quantity.SCRIPT_MIX, 0.0, 0.05, 0.2),
        ("format", 0.2, Quantity.FORMAT, 0.9, 0.75, 0.5),
    ],
)
def test_a_quantity_that_leaves_its_limit_is_an_alarm(
    name: str, limit: float, quantity: Quantity, start: float, inside: float, outside: float
) -> None:
    random, sign = np.random.default_rng(6), DRIFTS[name](limit)

    def run(end: float) -> list[Alarm]:
        means = [start if step < 20 else end for step in range(40)]
        noise = random.normal(0, 0.1 * max(start, 0.1), (40, 8))
        return alarms(
            [StepValues(s, {quantity: Moments.of((m + noise[s]).tolist())}) for s, m in enumerate(means)], sign
        )

    assert run(inside) == []
    found = run(outside)
    assert found[0].step == 24
    assert found[0].agreeing == 19
    assert f"guard.limits.{name}" in found[0].text


def test_steps_without_a_judge_are_left_out_of_windows() -> None:
    series = Series(2)
    empty = StepValues(1, {})
    full = {Quantity.JUDGE: Moments.of([1.0, 0.0])}
    assert [series.add(v) for v in (StepValues(1, full), empty, StepValues(3, full))] == [False, False, True]
    assert series.windows[0].shown_steps == "steps 1 to 3"

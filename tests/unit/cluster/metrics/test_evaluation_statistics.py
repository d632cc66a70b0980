"""Intervals, pass@k and reflection ratios against independent computations."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mobula.cluster.metrics.summary import (
    bootstrap_interval,
    interval_of_mean,
    ks,
    pass_at_k,
    reflection_ratios,
    wilson_interval,
)


def test_the_interval_is_the_one_of_the_literature() -> None:
    low, high = wilson_interval(0.1, 20)  # 2 of 20: Newcombe 1998's formula 3, computed by hand
    assert (round(low, 4), round(high, 4)) == (0.0279, 0.3010)
    low, high = wilson_interval(81 / 263, 263)  # his table I
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)


@given(num=st.integers(1, 10_000), share=st.floats(0, 1))
def test_the_interval_holds_the_mean_and_stays_within_0_and_1(num: int, share: float) -> None:
    low, high = wilson_interval(share, num)
    assert 0 <= low <= share + 1e-12
    assert share - 1e-12 <= high <= 1
    assert high > low


def test_the_interval_of_a_mean_is_that_of_a_share_within_0_and_1_and_a_bootstrap_elsewhere() -> None:
    assert interval_of_mean([1.0, 0.0, 0.5, 0.5], 0) == wilson_interval(0.5, 4)
    signed = [1.0] * 50 + [-1.0] * 50
    low, high = interval_of_mean(signed, 0)
    half = 1.96 / math.sqrt(100)  # the normal approximation: the standard deviation of a sign is 1
    assert low == pytest.approx(-half, abs=0.04) and high == pytest.approx(half, abs=0.04)
    assert interval_of_mean([-1.0] * 8, 0) == (-1.0, -1.0)
    assert interval_of_mean([10.0, 2.5], 3) == bootstrap_interval([10.0, 2.5], 3)


@given(data=st.data(), num=st.integers(1, 8))
def test_pass_at_k_is_the_share_of_all_choices_of_k_with_a_correct_one(data: st.DataObject, num: int) -> None:
    correct, k = data.draw(st.integers(0, num)), data.draw(st.integers(1, num))
    choices = list(itertools.combinations(range(num), k))
    expected = sum(any(i < correct for i in choice) for choice in choices) / len(choices)
    assert math.isclose(pass_at_k(num, correct, k), expected, abs_tol=1e-12)


@pytest.mark.parametrize(("num", "correct", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_outside_its_definition_is_refused(num: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match="is not defined"):
        pass_at_k(num, correct, k)


def test_pass_at_k_is_reported_for_powers_of_two_and_for_all_samples() -> None:
    assert [ks(num) for num in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_the_bootstrap_interval_is_near_the_normal_one_and_repeats() -> None:
    values = np.random.default_rng(0).normal(0.5, 0.2, size=400)
    low, high = bootstrap_interval(list(values), seed=3)
    half = 1.96 * values.std() / math.sqrt(values.size)
    assert math.isclose(high - low, 2 * half, rel_tol=0.1)
    assert math.isclose((high + low) / 2, values.mean(), abs_tol=half / 4)
    assert (low, high) == bootstrap_interval(list(values), seed=3)
    assert bootstrap_interval([0.25], seed=0) == (0.25, 0.25)


def test_reflection_ratios_of_a_table_counted_by_hand() -> None:
    """Ten responses: four reflect, three of these are correct; of the six others two are."""
    reflects = [True] * 4 + [False] * 6
    correct = [True, True, True, False] + [True, True] + [False] * 4
    assert reflection_ratios(correct, reflects) == {
        "reflection_ratio": 0.4,
        "reflection_ratio_in_correct": 0.6,
        "reflection_ratio_in_incorrect": 0.2,
        "correct_ratio": 0.5,
        "correct_ratio_in_reflection": 0.75,
        "correct_ratio_in_no_reflection": 1 / 3,
    }


def test_a_ratio_of_no_responses_is_0() -> None:
    ratios = reflection_ratios([True], [False])
    assert ratios["reflection_ratio_in_incorrect"] == ratios["correct_ratio_in_reflection"] == 0.0

"""Reducers: intervals that hold, and means that can be added to."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mobula.cluster.metrics.reducers import WeightedMean, mean_interval, standard_deviation, wilson


def test_wilson_agrees_with_the_published_example() -> None:
    estimate = wilson(81, 263)  # Newcombe (1998), table I: 0.2553 to 0.3662
    assert (estimate.low, estimate.high) == (pytest.approx(0.2553, abs=5e-5), pytest.approx(0.3662, abs=5e-5))


@given(num=st.integers(1, 5000), data=st.data())
def test_wilson_stays_inside_zero_and_one_and_around_the_share(num: int, data: st.DataObject) -> None:
    num_correct = data.draw(st.integers(0, num))
    estimate = wilson(num_correct, num)
    assert 0 <= estimate.low <= estimate.mean + 1e-12 and estimate.mean - 1e-12 <= estimate.high <= 1
    assert estimate.low < estimate.high


@pytest.mark.parametrize(("num_correct", "num"), [(1, 0), (3, 2), (-1, 2)])
def test_an_impossible_share_is_refused(num_correct: int, num: int) -> None:
    with pytest.raises(ValueError, match=f"got {num_correct} of {num}"):
        wilson(num_correct, num)


def test_the_interval_of_a_mean_is_two_standard_errors_wide_on_each_side() -> None:
    estimate = mean_interval([1.0, 2.0, 3.0, 4.0])
    half = 1.95996 * math.sqrt((2 * (1.5**2 + 0.5**2) / 3) / 4)
    assert estimate.mean == 2.5
    assert (estimate.low, estimate.high) == (pytest.approx(2.5 - half, abs=1e-4), pytest.approx(2.5 + half, abs=1e-4))


def test_one_value_has_an_unbounded_interval() -> None:
    assert mean_interval([2.0]).low == -math.inf and mean_interval([2.0]).high == math.inf
    with pytest.raises(ValueError, match="at least one"):
        mean_interval([])


@given(parts=st.lists(st.lists(st.floats(-1e3, 1e3), min_size=1), min_size=1))
def test_a_weighted_mean_of_parts_is_the_mean_of_the_whole(parts: list[list[float]]) -> None:
    mean = WeightedMean()
    for part in parts:
        mean.add(sum(part) / len(part), len(part))
    whole = [value for part in parts for value in part]
    assert mean.value == pytest.approx(sum(whole) / len(whole), abs=1e-8)


def test_a_mean_of_nothing_is_none() -> None:
    assert WeightedMean().value is None


def test_the_standard_deviation_of_equal_values_is_zero() -> None:
    assert standard_deviation([0.5] * 7) == 0
    assert standard_deviation([0.0, 2.0]) == 1

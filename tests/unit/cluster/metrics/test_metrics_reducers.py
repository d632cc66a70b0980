"""Reducers: intervals that hold, and means that can be added to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mobula.cluster.metrics.reducers import WeightedMean, standard_deviation, wilson


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

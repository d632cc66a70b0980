"""Reward shaping equals plain Python references, on edge inputs too."""

from __future__ import annotations

import random
import statistics

import numpy as np
import pytest
import torch

from mobula.learner.algorithms.advantages import RunningMoments
from mobula.learner.algorithms.shaping import credit_by_token, length_rewards, repeated_share


@pytest.mark.parametrize("ngram", [2, 3, 4])
def test_the_repeated_share_counts_ngrams_seen_before(ngram: int) -> None:
    rng = random.Random(0)
    for _ in range(50):
        tokens = [rng.randint(0, 2) for _ in range(rng.randint(0, 20))]
        grams = [tuple(tokens[i : i + ngram]) for i in range(len(tokens) - ngram + 1)]
        repeated = sum(gram in grams[:i] for i, gram in enumerate(grams))
        assert repeated_share(tokens, ngram) == pytest.approx(repeated / len(grams) if grams else 0.0)


def test_length_rewards_are_kimis_within_each_group() -> None:
    lengths, solved = torch.tensor([10, 20, 30, 10, 20, 7]), torch.tensor([True, False, True, False, True, True])
    included = torch.tensor([True, True, True, True, True, False])
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    # of the longest in group 0: 0.5 - 1; an unsolved response gains nothing from being short
    assert length_rewards(lengths, solved, included, groups).tolist() == [0.5, 0.0, -0.5, 0.0, -0.5, 0.0]


def test_equal_lengths_give_no_length_reward() -> None:
    ones = torch.ones(3, dtype=torch.bool)
    assert length_rewards(torch.tensor([5, 5, 5]), ones, ones, torch.zeros(3)).tolist() == [0.0] * 3


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_the_return_of_a_token_is_the_discounted_sum_of_what_follows(gamma: float) -> None:
    """LightRFT defect B11: gamma was used on the first micro-batch only. Here it is an argument of each response."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        num = int(rng.integers(1, 9))
        costs, mask = rng.normal(size=num).astype(np.float32), rng.random(num) < 0.7
        found = credit_by_token(2.0, costs, mask, gamma)
        if not mask.any():
            assert found.tolist() == [0.0] * num
            continue
        last = max(t for t in range(num) if mask[t])
        rewards = [(-float(costs[t]) if mask[t] else 0.0) + (2.0 if t == last else 0.0) for t in range(num)]
        expected = [sum(gamma ** (k - t) * rewards[k] for k in range(t, num)) for t in range(num)]
        assert found.tolist() == pytest.approx(expected, abs=1e-5)


def test_without_costs_and_discount_every_token_has_the_advantage_of_its_response() -> None:
    mask = np.array([True, False, True, False])
    assert credit_by_token(0.3, np.zeros(4, dtype=np.float32), mask, 1.0)[:3].tolist() == pytest.approx([0.3] * 3)


def test_running_moments_are_those_of_everything_so_far() -> None:
    rng = random.Random(1)
    moments, seen = RunningMoments(), []
    for _ in range(10):
        batch = [rng.gauss(5.0, 2.0) for _ in range(rng.randint(1, 7))]
        moments.add(torch.tensor(batch, dtype=torch.float64))
        seen += batch
        assert moments.mean == pytest.approx(statistics.fmean(seen))
        if len(seen) > 1:
            assert moments.scale == pytest.approx(statistics.stdev(seen))


@pytest.mark.parametrize("batch", [[3.0], [0.1] * 5, []])
def test_moments_of_nothing_to_compare_leave_rewards_as_they_are(batch: list[float]) -> None:
    """LightRFT defect B13: the deviation was infinite after one sample, and 8e-13 after a constant first batch, which
    made rewards 1e12."""
    moments = RunningMoments()
    moments.add(torch.tensor(batch))
    assert moments.scale == 1.0


def test_moments_do_not_depend_on_the_order_of_batches_and_skip_what_is_not_finite() -> None:
    """LightRFT defect B13: moments were those of one rank, in its own order."""
    first, second = torch.tensor([1.0, 2.0, float("nan")]), torch.tensor([7.0, float("inf")])
    one, other = RunningMoments(), RunningMoments()
    for moments, batches in ((one, (first, second)), (other, (second, first))):
        for batch in batches:
            moments.add(batch)
    assert one.state() == pytest.approx(other.state()) and one.count == 3


def test_moments_go_on_from_their_state() -> None:
    moments, again = RunningMoments(), RunningMoments()
    moments.add(torch.tensor([1.0, 2.0, 4.0]))
    again.load(moments.state())
    for one in (moments, again):
        one.add(torch.tensor([9.0]))
    assert again.state() == moments.state()

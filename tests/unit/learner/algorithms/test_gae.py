"""GAE equals brute-force references of its two definitions, in float64 and plain Python."""

from __future__ import annotations

import random

import numpy as np
import pytest

from mobula.configs.schema.algorithm import VALUED
from mobula.learner.algorithms.token_advantages import TOKEN_ADVANTAGES, TokenValues
from mobula.learner.algorithms.token_advantages import gae as credit


def response(
    rewards: list[float], values: list[float], mask: list[bool] | None = None, *, is_truncated: bool = False
) -> TokenValues:
    """`values` has one more than `rewards`."""
    chosen = np.array([True] * len(rewards) if mask is None else mask, dtype=bool)
    return TokenValues(np.array(rewards, np.float64), np.array(values, np.float32), chosen, is_truncated)


def gae(of: TokenValues, gamma: float, gae_lambda: float) -> np.ndarray:
    """The advantages; the return of a trained token is its advantage and its value."""
    advantages, returns = credit(of, gamma, gae_lambda)
    assert returns.tolist() == (advantages + np.where(of.mask, of.values[:-1].astype(np.float64), 0.0)).tolist()
    return advantages


def decisions(of: TokenValues) -> tuple[list[float], list[float]]:
    """Rewards [n] and values [n + 1] of the trained tokens alone, the last value being that of the end."""
    places = [t for t in range(len(of.mask)) if of.mask[t]]
    end = float(of.values[-1]) if of.is_truncated else 0.0
    return [float(of.rewards[t]) for t in places], [*(float(of.values[t]) for t in places), end]


def by_differences(of: TokenValues, gamma: float, gae_lambda: float) -> list[float]:
    """Equation 16 of arXiv:1506.02438, last line: the sum of discounted temporal differences, written out."""
    rewards, values = decisions(of)
    deltas = [r + gamma * after - before for r, before, after in zip(rewards, values, values[1:], strict=False)]
    return [sum((gamma * gae_lambda) ** (j - k) * deltas[j] for j in range(k, len(deltas))) for k in range(len(deltas))]


def by_estimators(of: TokenValues, gamma: float, gae_lambda: float) -> list[float]:
    """Equation 16, first line: the exponentially weighted mean of the n-step estimators of equations 11 to 14. An
    episode of finite length has one value for all estimators beyond its end, so the last one gets the rest of the
    weight."""
    rewards, values = decisions(of)
    num = len(rewards)

    def estimator(k: int, steps: int) -> float:
        discounted = sum(gamma**i * rewards[k + i] for i in range(steps))
        return discounted + gamma**steps * values[k + steps] - values[k]

    found = []
    for k in range(num):
        longest = num - k
        weights = [(1 - gae_lambda) * gae_lambda ** (n - 1) for n in range(1, longest)] + [gae_lambda ** (longest - 1)]
        found.append(sum(w * estimator(k, n) for n, w in enumerate(weights, start=1)))
    return found


def random_response(rng: random.Random) -> TokenValues:
    num = rng.randint(0, 14)
    return response(
        [rng.gauss(0, 1) for _ in range(num)],
        [rng.gauss(0, 2) for _ in range(num + 1)],
        [rng.random() < 0.7 for _ in range(num)],
        is_truncated=rng.random() < 0.5,
    )


@pytest.mark.parametrize("reference", [by_differences, by_estimators])
@pytest.mark.parametrize("gamma", [1.0, 0.99, 0.5])
@pytest.mark.parametrize("gae_lambda", [0.0, 0.3, 0.95, 1.0])
def test_gae_equals_its_definition_on_random_responses(reference, gamma: float, gae_lambda: float) -> None:
    """LightRFT defect B11: gamma was used on the first micro-batch only. Here it is an argument of each response."""
    rng = random.Random(0)
    for _ in range(60):
        of = random_response(rng)
        found = gae(of, gamma, gae_lambda)
        assert found.dtype == np.float64 and found.shape == of.mask.shape
        assert found[of.mask].tolist() == pytest.approx(reference(of, gamma, gae_lambda), abs=1e-12, rel=1e-12)
        assert not found[~of.mask].any(), "tokens that the policy did not sample"


def test_a_long_response_is_exact() -> None:
    rng = np.random.default_rng(0)
    of = response(rng.normal(size=3000).tolist(), rng.normal(size=3001).tolist())
    expected = by_differences(of, 0.999, 0.99)
    assert gae(of, 0.999, 0.99).tolist() == pytest.approx(expected, abs=1e-10)


def test_lambda_1_is_the_return_less_the_value_and_lambda_0_the_next_difference() -> None:
    of = response([0.0, 0.0, 1.0], [0.2, 0.4, 0.6, 9.0])
    assert gae(of, 1.0, 1.0).tolist() == pytest.approx([0.8, 0.6, 0.4])
    assert gae(of, 1.0, 0.0).tolist() == pytest.approx([0.2, 0.2, 0.4])


def test_a_response_that_was_cut_off_goes_on_from_its_last_value_and_one_that_ended_does_not() -> None:
    """LightRFT defect B15: the finish reason was lost, so both were treated alike."""
    rewards, values = [0.0, 1.0], [0.5, 0.25, 3.0]
    assert gae(response(rewards, values), 0.5, 1.0).tolist() == pytest.approx([0.5 - 0.5, 1 - 0.25])
    cut = gae(response(rewards, values, is_truncated=True), 0.5, 1.0)
    assert cut.tolist() == pytest.approx([0.5 * 1 + 0.25 * 3 - 0.5, 1 + 0.5 * 3 - 0.25])


def test_what_an_environment_wrote_between_two_turns_is_no_decision() -> None:
    """Whatever stands at the places of masked tokens changes nothing, and the next turn follows at once."""
    mask = [True, False, False, True, False]
    first = response([0.1, 7.0, -7.0, 1.0, 5.0], [0.3, 99.0, -99.0, 0.6, 42.0, 2.0], mask)
    second = response([0.1, 0.0, 0.0, 1.0, 0.0], [0.3, 0.0, 0.0, 0.6, 0.0, 2.0], mask)
    turns = response([0.1, 1.0], [0.3, 0.6, 2.0])
    for gamma, gae_lambda in ((1.0, 0.95), (0.9, 0.5)):
        found = gae(first, gamma, gae_lambda)
        assert found.tolist() == gae(second, gamma, gae_lambda).tolist()
        assert found[[0, 3]].tolist() == pytest.approx(gae(turns, gamma, gae_lambda).tolist())


@pytest.mark.parametrize("is_truncated", [False, True])
@pytest.mark.parametrize("mask", [[], [False], [False, False, False]])
def test_a_response_without_a_trained_token_has_advantages_of_zero(mask: list[bool], is_truncated: bool) -> None:
    of = response([1.0] * len(mask), [1.0] * (len(mask) + 1), mask, is_truncated=is_truncated)
    assert gae(of, 0.9, 0.9).tolist() == [0.0] * len(mask)


def test_huge_rewards_and_values_stay_exact() -> None:
    huge = 2.0**40
    assert gae(response([0.0, huge], [-huge, huge, 0.0]), 1.0, 0.5).tolist() == [2 * huge, 0.0]


def test_a_perfect_critic_leaves_nothing_to_credit() -> None:
    """Values that are the discounted returns have temporal differences of 0."""
    gamma, rewards = 0.9, [0.5, -1.0, 2.0]
    values = [sum(gamma ** (j - k) * rewards[j] for j in range(k, 3)) for k in range(3)]
    assert gae(response(rewards, [*values, 7.0]), gamma, 0.7).tolist() == pytest.approx([0.0] * 3, abs=1e-6)


def test_every_advantage_that_reads_values_has_a_formula_for_tokens() -> None:
    assert sorted(TOKEN_ADVANTAGES) == sorted(VALUED)

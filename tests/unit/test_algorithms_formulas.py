"""Advantages, policy loss, KL and aggregation equal their formulas, worked out by hand or by plain Python."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from learner.algorithms.advantages import ADVANTAGES, STD_FLOOR, dr_grpo, grpo, reinforce, rloo
from learner.algorithms.aggregation import Totals, sequence_mean, token_mean
from learner.algorithms.kl import KL_ESTIMATORS, k1, k2, k3
from learner.algorithms.over_age import by_age, truncated_importance
from learner.algorithms.policy_losses import clipped_surrogate

REWARDS = [1.0, 0.0, 0.5, 1.0]


def one_group(values: list[float]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.tensor(values), torch.ones(len(values), dtype=torch.bool), torch.zeros(len(values), dtype=torch.int64)


def test_grpo_is_reward_minus_mean_over_sample_standard_deviation() -> None:
    mean, std = statistics.mean(REWARDS), statistics.stdev(REWARDS)
    expected = [(r - mean) / (std + STD_FLOOR) for r in REWARDS]
    assert grpo(*one_group(REWARDS)).tolist() == pytest.approx(expected, abs=1e-6)


def test_dr_grpo_is_reward_minus_mean() -> None:
    assert dr_grpo(*one_group(REWARDS)).tolist() == pytest.approx([0.375, -0.625, -0.125, 0.375])


def test_rloo_is_reward_minus_mean_of_the_others() -> None:
    expected = [r - statistics.mean(REWARDS[:i] + REWARDS[i + 1 :]) for i, r in enumerate(REWARDS)]
    assert rloo(*one_group(REWARDS)).tolist() == pytest.approx(expected)


def test_reinforce_is_the_reward() -> None:
    assert reinforce(*one_group(REWARDS)).tolist() == REWARDS


@pytest.mark.parametrize("name", ADVANTAGES)
def test_siblings_are_found_by_id_wherever_they_stand(name: str) -> None:
    rewards = torch.tensor([0.0, 5.0, 1.0, 7.0, 0.5, 9.0])
    ids = torch.tensor([4, 9, 4, 9, 4, 9])
    included = torch.ones(6, dtype=torch.bool)
    mixed = ADVANTAGES[name](rewards, included, ids)
    for group in (4, 9):
        alone = ADVANTAGES[name](rewards[ids == group], included[:3], ids[ids == group])
        torch.testing.assert_close(mixed[ids == group], alone)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_excluded_sibling_changes_nothing_and_gets_nothing(name: str) -> None:
    included = torch.tensor([True, True, False, True])
    with_excluded = ADVANTAGES[name](torch.tensor([1.0, 0.0, math.nan, 0.5]), included, torch.zeros(4))
    without = ADVANTAGES[name](*one_group([1.0, 0.0, 0.5]))
    torch.testing.assert_close(with_excluded[included], without)
    assert with_excluded[2] == 0


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("values", [[0.7], [0.1, 0.1, 0.1]])
def test_a_group_with_nothing_to_compare_has_no_advantage(name: str, values: list[float]) -> None:
    assert ADVANTAGES[name](*one_group(values)).abs().max() < 1e-9


def surrogate(ratio: float, advantage: float) -> tuple[float, float, bool]:
    """(loss, d loss / d logprob, is_clipped) of one token with clip range [0.8, 1.3]."""
    logprobs = torch.tensor([[math.log(ratio) - 2.0]], dtype=torch.float64, requires_grad=True)
    old = torch.full((1, 1), -2.0, dtype=torch.float64)
    out = clipped_surrogate(logprobs, old, torch.tensor([[advantage]]).double(), clip_low=0.2, clip_high=0.3)
    out.loss.sum().backward()
    return out.loss.item(), logprobs.grad.item(), bool(out.is_clipped)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.1, 2.0, (-2.2, -2.2, False)),  # inside: gradient is -r A
        (1.5, 2.0, (-2.6, 0.0, True)),  # good and already likelier: held at 1.3
        (0.5, 2.0, (-1.0, -1.0, False)),  # good but less likely: free
        (0.5, -2.0, (1.6, 0.0, True)),  # bad and already less likely: held at 0.8
        (1.5, -2.0, (3.0, 3.0, False)),  # bad but likelier: free
    ],
)
def test_clipped_surrogate_in_every_region(ratio: float, advantage: float, expected: tuple[float, float, bool]) -> None:
    assert surrogate(ratio, advantage) == pytest.approx(expected)


def test_clipped_surrogate_stays_finite_for_log_probs_far_apart() -> None:
    out = clipped_surrogate(torch.zeros(1, 1), torch.full((1, 1), -1e4), -torch.ones(1, 1), clip_low=0.2, clip_high=0.2)
    assert torch.isfinite(out.loss).all()


def test_kl_estimators_equal_their_formulas() -> None:
    p, q = torch.tensor([[-1.0]]), torch.tensor([[-1.5]])
    assert k1(p, q).item() == pytest.approx(0.5)
    assert k2(p, q).item() == pytest.approx(0.125)
    assert k3(p, q).item() == pytest.approx(math.exp(-0.5) - 1 + 0.5)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_unbiased_kl_estimators_average_to_the_exact_kl(name: str) -> None:
    p = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    q = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    exact = (p * (p / q).log()).sum()
    assert (p * KL_ESTIMATORS[name](p.log(), q.log())).sum().item() == pytest.approx(exact.item(), rel=1e-12)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_kl_gradients_equal_finite_differences(name: str) -> None:
    p = torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([[-1.7, -0.4]], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: KL_ESTIMATORS[name](x, q), (p,))


VALUES = torch.tensor([[1.0, 2.0, math.nan], [4.0, math.nan, math.nan]])
MASK = torch.tensor([[True, True, False], [True, False, False]])


def test_token_mean_weighs_tokens_and_sequence_mean_weighs_responses() -> None:
    assert token_mean(VALUES, MASK, Totals(3, 2)).item() == pytest.approx((1 + 2 + 4) / 3)
    assert sequence_mean(VALUES, MASK, Totals(3, 2)).item() == pytest.approx((1.5 + 4) / 2)


@pytest.mark.parametrize("aggregate", [token_mean, sequence_mean])
def test_parts_add_up_to_the_whole(aggregate) -> None:
    whole = aggregate(VALUES, MASK, Totals(3, 2))
    parts = sum(aggregate(VALUES[i : i + 1], MASK[i : i + 1], Totals(3, 2)) for i in range(2))
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("aggregate", [token_mean, sequence_mean])
def test_an_empty_mask_gives_zero_loss_and_zero_gradient(aggregate) -> None:
    values = torch.full((2, 3), 5.0, requires_grad=True)
    loss = aggregate(values, torch.zeros(2, 3, dtype=torch.bool), Totals(0, 0))
    loss.backward()
    assert loss.item() == 0 and values.grad.abs().max() == 0


def test_truncated_importance_is_reinforce_weighted_by_a_capped_constant_ratio() -> None:
    now, old, advantages = [-1.0, -0.5, -3.0], [-1.5, -2.5, -1.0], 0.7
    logprobs = torch.tensor([now], requires_grad=True)
    loss = truncated_importance(logprobs, torch.tensor([old]), torch.tensor([[advantages]]), weight_cap=2.0)
    weights = [min(math.exp(a - b), 2.0) for a, b in zip(now, old, strict=True)]
    assert weights[1] == 2.0 and weights[2] < 1 < weights[0] < 2
    assert loss[0].tolist() == pytest.approx([-w * advantages * a for w, a in zip(weights, now, strict=True)])
    loss.sum().backward()
    assert logprobs.grad[0].tolist() == pytest.approx([-w * advantages for w in weights]), "the weight has no gradient"


def test_each_age_has_its_own_loss() -> None:
    young, old = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([[10.0, 20.0, 30.0, 40.0]])
    ages = torch.tensor([[0, 2, 3, 4]])
    assert by_age(young, old, ages, max_staleness=2, max_age=3).tolist() == [[1.0, 2.0, 30.0, 0.0]]
    assert by_age(young, old, ages, max_staleness=2, max_age=2).tolist() == [[1.0, 2.0, 0.0, 0.0]]

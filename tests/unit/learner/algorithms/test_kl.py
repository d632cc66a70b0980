"""KL estimators and distillation equal the divergences that they are to descend."""

from __future__ import annotations

import math

import pytest
import torch

from mobula.learner.algorithms.kl import (
    KL_ESTIMATORS,
    AdaptiveCoefficient,
    FixedCoefficient,
    capped,
    reverse_kl,
    teacher_advantage,
)

P = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
Q = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
B = torch.tensor([0.1, 0.3, 0.6], dtype=torch.float64)


def test_kl_estimators_equal_their_formulas() -> None:
    p, q, b = (torch.tensor([[x]]) for x in (-1.0, -1.5, -1.2))
    found = {name: estimator(p, q, b).item() for name, estimator in KL_ESTIMATORS.items()}
    k3 = math.exp(-0.5) - 1 + 0.5
    expected = {"k1": 0.5, "k2": 0.125, "k3": k3, "k3_importance": math.exp(0.2) * k3}
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("name", ["k1", "k3", "k3_importance"])
def test_unbiased_estimators_average_to_the_exact_kl(name: str) -> None:
    """Over samples of p; k3_importance over samples of another policy b."""
    exact = (P * (P / Q).log()).sum().item()
    sampler = B if name == "k3_importance" else P
    found = (sampler * KL_ESTIMATORS[name](P.log(), Q.log(), sampler.log())).sum().item()
    assert found == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize(("name", "sampler"), [("k2", P), ("k3_importance", P), ("k3_importance", B)])
def test_as_a_loss_the_expected_gradient_is_that_of_the_kl(name: str, sampler: torch.Tensor) -> None:
    logits = P.log().clone().requires_grad_()
    [exact] = torch.autograd.grad((logits.softmax(0) * (logits.log_softmax(0) - Q.log())).sum(), logits)
    estimate = (sampler * KL_ESTIMATORS[name](logits.log_softmax(0), Q.log(), sampler.log())).sum()
    [found] = torch.autograd.grad(estimate, logits)
    torch.testing.assert_close(found, exact)


def test_k1_as_a_loss_has_an_expected_gradient_of_zero() -> None:
    """LightRFT allowed k1 in the loss with a printed hint; here the configuration refuses it."""
    logits = P.log().clone().requires_grad_()
    estimate = (P * KL_ESTIMATORS["k1"](logits.log_softmax(0), Q.log(), P.log())).sum()
    [found] = torch.autograd.grad(estimate, logits)
    assert found.abs().max() < 1e-12


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_kl_gradients_equal_finite_differences(name: str) -> None:
    p = torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    q, b = torch.tensor([[-1.7, -0.4]], dtype=torch.float64), torch.tensor([[-1.2, -1.4]], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: KL_ESTIMATORS[name](x, q, b), (p,))


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_policies_that_share_no_mass_stay_finite(name: str) -> None:
    found = KL_ESTIMATORS[name](torch.tensor([[0.0, -1e4]]), torch.tensor([[-1e4, 0.0]]), torch.tensor([[-1e4, 0.0]]))
    assert torch.isfinite(found).all()


def test_a_cap_holds_each_token_on_both_sides_and_zero_is_no_cap() -> None:
    kl = torch.tensor([[-3.0, 0.5, 7.0]])
    assert capped(kl, 2.0).tolist() == [[-2.0, 0.5, 2.0]] and capped(kl, 0.0) is kl


def test_the_adaptive_coefficient_follows_the_error_within_a_fifth() -> None:
    coefficient = AdaptiveCoefficient(0.1, target=0.05, horizon=1000.0)
    coefficient.observe(0.055, 100)  # 10 % above
    assert coefficient.value == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    coefficient.observe(5.0, 100)  # held at 20 %
    assert coefficient.value == pytest.approx(0.101 * 1.02)
    coefficient.observe(0.0, 100)
    assert coefficient.value == pytest.approx(0.101 * 1.02 * 0.98)


def test_the_fixed_coefficient_stays() -> None:
    coefficient = FixedCoefficient(0.1)
    coefficient.observe(5.0, 100)
    assert coefficient.value == 0.1


TAUGHT_P = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
TAUGHT_Q = torch.tensor([0.4, 0.35, 0.25], dtype=torch.float64)

EXACT = sum(p * math.log(p / q) for p, q in zip(TAUGHT_P.tolist(), TAUGHT_Q.tolist(), strict=True))


def exact_gradient() -> torch.Tensor:
    """Of KL(softmax(logits) || Q) for every logit: p_i (log p_i - log q_i - KL)."""
    return torch.stack([p * ((p / q).log() - EXACT) for p, q in zip(TAUGHT_P, TAUGHT_Q, strict=True)])


@pytest.mark.parametrize("sampler", [TAUGHT_P, B], ids=["its own samples", "samples of another policy"])
def test_the_loss_averages_to_the_reverse_kl_and_its_gradient(sampler: torch.Tensor) -> None:
    logits = TAUGHT_P.log().clone().requires_grad_()
    by_token = reverse_kl(logits.log_softmax(0), TAUGHT_Q.log(), sampler.log(), cap=0.0)
    expected = (sampler * by_token).sum()
    assert expected.item() == pytest.approx(EXACT, rel=1e-12)
    [found] = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(found, exact_gradient())


def test_the_advantage_as_a_policy_gradient_has_the_gradient_of_the_reverse_kl() -> None:
    logits = TAUGHT_P.log().clone().requires_grad_()
    advantages = teacher_advantage(TAUGHT_P.log(), TAUGHT_Q.log(), cap=0.0)
    [found] = torch.autograd.grad(-(TAUGHT_P * advantages * logits.log_softmax(0)).sum(), logits)
    torch.testing.assert_close(found, exact_gradient())


def test_a_cap_bounds_the_log_ratio_on_both_sides() -> None:
    logprobs, teacher = torch.tensor([-1.0, -9.0, -1.0]), torch.tensor([-30.0, -1.0, -1.5])
    assert teacher_advantage(logprobs, teacher, cap=5.0).tolist() == [-5.0, 5.0, -0.5]
    assert teacher_advantage(logprobs, teacher, cap=0.0).tolist() == [-29.0, 8.0, -0.5]
    assert reverse_kl(logprobs, teacher, logprobs, cap=5.0).tolist() == [5.0, -5.0, 0.5]


def test_distillation_of_policies_that_share_no_mass_stays_finite() -> None:
    logprobs = torch.tensor([-1e-3, -200.0], requires_grad=True)
    loss = reverse_kl(logprobs, torch.tensor([-300.0, -1e-3]), torch.tensor([-200.0, -1e-3]), cap=0.0).sum()
    loss.backward()
    assert loss.isfinite() and logprobs.grad.isfinite().all()

"""Both forms of on-policy distillation equal the reverse KL that they are to descend."""

from __future__ import annotations

import math

import pytest
import torch

from mobula.learner.algorithms.distillation import reverse_kl, teacher_advantage

P = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
Q = torch.tensor([0.4, 0.35, 0.25], dtype=torch.float64)
B = torch.tensor([0.1, 0.3, 0.6], dtype=torch.float64)
EXACT = sum(p * math.log(p / q) for p, q in zip(P.tolist(), Q.tolist(), strict=True))


def exact_gradient() -> torch.Tensor:
    """Of KL(softmax(logits) || Q) for every logit: p_i (log p_i - log q_i - KL)."""
    return torch.stack([p * ((p / q).log() - EXACT) for p, q in zip(P, Q, strict=True)])


@pytest.mark.parametrize("sampler", [P, B], ids=["its own samples", "samples of another policy"])
def test_the_loss_averages_to_the_reverse_kl_and_its_gradient(sampler: torch.Tensor) -> None:
    logits = P.log().clone().requires_grad_()
    by_token = reverse_kl(logits.log_softmax(0), Q.log(), sampler.log(), cap=0.0)
    expected = (sampler * by_token).sum()
    assert expected.item() == pytest.approx(EXACT, rel=1e-12)
    [found] = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(found, exact_gradient())


def test_the_advantage_as_a_policy_gradient_has_the_gradient_of_the_reverse_kl() -> None:
    logits = P.log().clone().requires_grad_()
    advantages = teacher_advantage(P.log(), Q.log(), cap=0.0)
    [found] = torch.autograd.grad(-(P * advantages * logits.log_softmax(0)).sum(), logits)
    torch.testing.assert_close(found, exact_gradient())


def test_a_cap_bounds_the_log_ratio_on_both_sides() -> None:
    logprobs, teacher = torch.tensor([-1.0, -9.0, -1.0]), torch.tensor([-30.0, -1.0, -1.5])
    assert teacher_advantage(logprobs, teacher, cap=5.0).tolist() == [-5.0, 5.0, -0.5]
    assert teacher_advantage(logprobs, teacher, cap=0.0).tolist() == [-29.0, 8.0, -0.5]
    assert reverse_kl(logprobs, teacher, logprobs, cap=5.0).tolist() == [5.0, -5.0, 0.5]


def test_policies_that_share_no_mass_stay_finite() -> None:
    logprobs = torch.tensor([-1e-3, -200.0], requires_grad=True)
    loss = reverse_kl(logprobs, torch.tensor([-300.0, -1e-3]), torch.tensor([-200.0, -1e-3]), cap=0.0).sum()
    loss.backward()
    assert loss.isfinite() and logprobs.grad.isfinite().all()

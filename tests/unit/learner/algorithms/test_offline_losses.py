"""Losses of offline jobs against references written from the papers in float64, and their gradients."""

from __future__ import annotations

import math

import pytest
import torch

from mobula.learner.algorithms.offline_losses import PREFERENCE_LOSSES, SCORE_LOSSES

CASES = [(0.0, 0.0), (1.5, -2.0), (-30.0, 4.0), (0.3, 0.3), (900.0, -900.0), (-900.0, 900.0)]
RNG = torch.Generator().manual_seed(0)
CHOSEN = torch.cat([torch.tensor([a for a, _ in CASES]), 5 * torch.randn(50, generator=RNG)]).double()
REJECTED = torch.cat([torch.tensor([b for _, b in CASES]), 5 * torch.randn(50, generator=RNG)]).double()


def log_sigmoid(x: float) -> float:
    """log(1 / (1 + exp(-x))), written so that it does not overflow."""
    return -math.log1p(math.exp(-x)) if x >= 0 else x - math.log1p(math.exp(x))


def dpo(chosen: float, rejected: float, beta: float, smoothing: float) -> float:
    """arXiv:2305.18290, equation 7, over the two possible labels with probabilities 1 - smoothing and smoothing."""
    z = beta * chosen - beta * rejected
    return (1 - smoothing) * -log_sigmoid(z) + smoothing * -log_sigmoid(-z)


def ipo(chosen: float, rejected: float, tau: float) -> float:
    """arXiv:2310.12036, equation 17: the log-ratio h regresses to tau^-1 / 2."""
    h = chosen - rejected
    return math.pow(h - math.pow(tau, -1) / 2, 2)


@pytest.mark.parametrize("beta", [0.01, 0.1, 2.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.49])
def test_the_logistic_loss_is_that_of_dpo(beta: float, smoothing: float) -> None:
    found = PREFERENCE_LOSSES["sigmoid"](CHOSEN, REJECTED, beta=beta, label_smoothing=smoothing)
    expected = [dpo(c, r, beta, smoothing) for c, r in zip(CHOSEN.tolist(), REJECTED.tolist(), strict=True)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("beta", [0.01, 0.1, 2.0])
def test_the_squared_loss_is_that_of_ipo(beta: float) -> None:
    found = PREFERENCE_LOSSES["ipo"](CHOSEN, REJECTED, beta=beta, label_smoothing=0.0)
    expected = [ipo(c, r, beta) for c, r in zip(CHOSEN.tolist(), REJECTED.tolist(), strict=True)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_the_pairwise_loss_is_the_likelihood_of_bradley_and_terry() -> None:
    """P(chosen wins) = exp(s_c) / (exp(s_c) + exp(s_r))."""
    found = SCORE_LOSSES["bradley_terry"](CHOSEN, REJECTED)
    expected = []
    for chosen, rejected in zip(CHOSEN.tolist(), REJECTED.tolist(), strict=True):
        top = max(chosen, rejected)
        expected.append(top + math.log(math.exp(chosen - top) + math.exp(rejected - top)) - chosen)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_a_margin_moves_the_point_of_even_odds() -> None:
    found = SCORE_LOSSES["bradley_terry"](CHOSEN, REJECTED, margin=0.7)
    pairs = zip(CHOSEN.tolist(), REJECTED.tolist(), strict=True)
    assert found.tolist() == pytest.approx([-log_sigmoid(chosen - rejected - 0.7) for chosen, rejected in pairs])


def test_regression_is_the_squared_distance_from_the_label() -> None:
    found = SCORE_LOSSES["regression"](CHOSEN, REJECTED)
    pairs = zip(CHOSEN.tolist(), REJECTED.tolist(), strict=True)
    assert found.tolist() == pytest.approx([(score - label) ** 2 for score, label in pairs])


@pytest.mark.parametrize(
    "loss",
    [
        lambda a, b: PREFERENCE_LOSSES["sigmoid"](a, b, beta=0.3, label_smoothing=0.1),
        lambda a, b: PREFERENCE_LOSSES["ipo"](a, b, beta=0.3, label_smoothing=0.0),
        SCORE_LOSSES["bradley_terry"],
        lambda a, b: SCORE_LOSSES["bradley_terry"](a, b, margin=0.4),
        SCORE_LOSSES["regression"],
    ],
    ids=["sigmoid", "ipo", "bradley_terry", "margin", "regression"],
)
def test_gradients_are_those_of_finite_differences(loss) -> None:
    chosen, rejected = (5 * torch.randn(8, generator=RNG, dtype=torch.float64) for _ in range(2))
    assert torch.autograd.gradcheck(loss, (chosen.requires_grad_(), rejected.requires_grad_()))


def test_losses_and_gradients_stay_finite_at_huge_margins() -> None:
    for loss in (
        lambda a, b: PREFERENCE_LOSSES["sigmoid"](a, b, beta=1.0, label_smoothing=0.1),
        *SCORE_LOSSES.values(),
    ):
        a, b = torch.tensor([1e4, -1e4]).requires_grad_(), torch.tensor([-1e4, 1e4]).requires_grad_()
        value = loss(a, b)
        value.sum().backward()
        assert value.isfinite().all() and a.grad.isfinite().all() and b.grad.isfinite().all()

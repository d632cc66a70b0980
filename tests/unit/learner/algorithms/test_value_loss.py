"""The value loss equals a plain Python reference, its gradient finite differences, explained variance scikit-learn."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from sklearn.metrics import explained_variance_score

from mobula.learner.algorithms.token_advantages import explained_variance, value_loss


def reference(value: float, old: float, target: float, clip: float) -> float:
    """Half the larger squared error, of the value and of the value held within `clip` of the old one."""
    errors = [value - target]
    if clip > 0:
        errors.append(max(old - clip, min(old + clip, value)) - target)
    return max(e * e for e in errors) / 2


@pytest.mark.parametrize("clip", [0.0, 0.2, 1.0])
def test_the_loss_is_the_larger_of_both_squared_errors(clip: float) -> None:
    rng = random.Random(0)
    rows = [[rng.gauss(0, 1) for _ in range(200)] for _ in range(3)]
    found = value_loss(*(torch.tensor([row], dtype=torch.float64) for row in rows), clip=clip)
    expected = [reference(v, o, r, clip) for v, o, r in zip(*rows, strict=True)]
    assert found.loss[0].tolist() == pytest.approx(expected, abs=1e-12)
    assert bool(found.is_clipped.any()) == (clip > 0)


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_the_gradient_is_that_of_finite_differences(clip: float) -> None:
    rng = np.random.default_rng(0)
    values, old, returns = (torch.tensor(rng.normal(size=(4, 25))) for _ in range(3))
    values.requires_grad_(True)
    found = value_loss(values, old, returns, clip=clip)
    [gradient] = torch.autograd.grad(found.loss.sum(), values)
    step = 1e-6
    for place in np.ndindex(*values.shape):
        v, o, r = (float(t.detach()[place]) for t in (values, old, returns))
        expected = (reference(v + step, o, r, clip) - reference(v - step, o, r, clip)) / (2 * step)
        assert float(gradient[place]) == pytest.approx(expected, abs=1e-5)
    assert not gradient[found.is_clipped].any(), "the clip holds the gradient back"
    assert gradient[~found.is_clipped].all()


@pytest.mark.parametrize(
    ("value", "is_clipped"),
    [
        (0.6, True),  # beyond the bound, towards the target
        (1.5, False),  # beyond the target: the plain error is the larger one
        (0.1, False),  # within the bound
        (-0.6, False),  # beyond the bound, away from the target
        (0.0, False),
    ],
)
def test_a_value_is_clipped_that_left_the_old_one_towards_its_target(value: float, is_clipped: bool) -> None:
    found = value_loss(torch.tensor([[value]]), torch.zeros(1, 1), torch.tensor([[0.8]]), clip=0.2)
    assert found.is_clipped.item() is is_clipped


def test_a_value_at_the_bound_has_a_gradient() -> None:
    value = torch.tensor([[0.25]], requires_grad=True)
    found = value_loss(value, torch.zeros(1, 1), torch.tensor([[1.0]]), clip=0.25)
    [gradient] = torch.autograd.grad(found.loss.sum(), value)
    assert gradient.item() == -0.75 and not found.is_clipped.item()


def test_a_return_that_was_reached_has_no_loss() -> None:
    same = torch.full((1, 3), 0.7)
    found = value_loss(same, same, same, clip=0.2)
    assert not found.loss.any() and not found.is_clipped.any()


def test_explained_variance_is_that_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    for noise in (0.0, 0.1, 1.0, 5.0):
        returns = rng.normal(size=50).astype(np.float32)
        values = (returns + noise * rng.normal(size=50)).astype(np.float32)
        assert explained_variance(values, returns) == pytest.approx(explained_variance_score(returns, values))
    assert explained_variance(np.full(50, 3.0), returns) == pytest.approx(0.0)


def test_explained_variance_is_defined_where_there_is_nothing_to_explain() -> None:
    assert explained_variance(np.array([1.0, 2.0]), np.array([4.0, 4.0])) == 0.0
    assert explained_variance(np.zeros(0), np.zeros(0)) == 0.0

"""Estimators of the KL, and corrections of tokens of older weights."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable

import pytest
import torch

from mobula.configs.load import load_config
from mobula.learner.algorithms.corrections import CORRECTIONS, OLD_LOGPROBS
from mobula.learner.algorithms.kl import (
    KL_ESTIMATORS,
    AdaptiveCoefficient,
    FixedCoefficient,
    capped,
    reverse_kl,
    teacher_advantage,
)
from mobula.learner.algorithms.policy_losses import AGGREGATIONS, Totals, token_mean

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


def test_distillation_of_policies_that_share_no_mass_stays_finite() -> None:
    logprobs = torch.tensor([-1e-3, -200.0], requires_grad=True)
    loss = reverse_kl(logprobs, torch.tensor([-300.0, -1e-3]), torch.tensor([-200.0, -1e-3]), cap=0.0).sum()
    loss.backward()
    assert loss.isfinite() and logprobs.grad.isfinite().all()


PARAMETERS = {
    "none": {},
    "decoupled": {},
    "tis_token": {"cap": 1.5},
    "tis_sequence": {"cap": 1.5},
    "icepop": {"low": 0.5, "high": 1.5},
    "mis": {"cap": 1.5},
}


def product(proximal: list[float], behavior: list[float]) -> float:
    return math.prod(math.exp(p - b) for p, b in zip(proximal, behavior, strict=True))


def each(rule: Callable[[float], float]) -> Callable[[list[float], list[float]], list[float]]:
    return lambda proximal, behavior: [rule(math.exp(p - b)) for p, b in zip(proximal, behavior, strict=True)]


REFERENCES: dict[str, Callable[[list[float], list[float]], list[float]]] = {
    "none": each(lambda w: 1.0),
    "decoupled": each(lambda w: w),
    "tis_token": each(lambda w: min(w, 1.5)),
    "tis_sequence": lambda p, b: [min(product(p, b), 1.5)] * len(p),
    "icepop": each(lambda w: w if 0.5 <= w <= 1.5 else 0.0),
    "mis": lambda p, b: [product(p, b) if product(p, b) <= 1.5 else 0.0] * len(p),
}


def test_every_correction_has_a_reference_and_its_parameters_are_those_of_the_configuration() -> None:
    assert REFERENCES.keys() == PARAMETERS.keys() == CORRECTIONS.keys()
    known = load_config(["experiment=digits"]).algorithm.corrections.model_dump()
    for name, function in CORRECTIONS.items():
        keywords = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
        assert keywords == list(known[name] if name in known else [])


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_correction_equals_its_reference(name: str) -> None:
    rng = random.Random(3)
    for _ in range(30):
        num = rng.randint(1, 5)
        behavior = [-rng.uniform(0.1, 3.0) for _ in range(num)]
        proximal = [b + rng.gauss(0, 0.5) for b in behavior]
        rows = [torch.tensor([[*x, -1.0, -7.0]], dtype=torch.float64) for x in (proximal, behavior)]
        rows[0].requires_grad_()
        mask = torch.tensor([[True] * num + [False] * 2])
        rows[0].data[~mask] = 3.0  # of padding, which has no part in a product
        found = CORRECTIONS[name](*rows, mask, **PARAMETERS[name])
        assert found[mask].tolist() == pytest.approx(REFERENCES[name](proximal, behavior), rel=1e-9)
        assert not found.requires_grad


@pytest.mark.parametrize("name", ["decoupled", "tis_token", "tis_sequence", "icepop", "mis"])
@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf])
def test_a_log_prob_that_is_not_finite_counts_as_no_difference(name: str, strange: float) -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    found = CORRECTIONS[name](torch.tensor([[strange, -1.0]]), torch.tensor([[-1.0, -1.0]]), mask, **PARAMETERS[name])
    assert found.tolist() == [[1.0, 1.0]]


def test_a_rejected_token_lends_its_weight_to_no_other() -> None:
    """The mean counts tokens before the mask: with half of them rejected, the other half weighs what it did."""
    proximal, behavior = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.0, -4.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    weights = CORRECTIONS["icepop"](proximal, behavior, mask, low=0.5, high=5.0)
    assert weights.tolist() == [[1.0, 0.0]]
    assert token_mean(weights * torch.full((1, 2), 3.0), mask, Totals(2, 1)).item() == 1.5


def test_old_log_probs_are_the_engines_the_learners_or_between_them_by_age() -> None:
    """AReaL's formula: log b + a (log p - log b), a = (v_prox - v_b) / (v_theta - v_b), v_prox = v_theta - 1."""
    now = torch.full((1, 3), -1.0, requires_grad=True)
    behavior, recomputed = torch.full((1, 3), -3.0), torch.full((1, 3), -1.5)
    v_theta, v_b = 8, torch.tensor([[7, 6, 3]])
    found = {name: old(now, behavior, recomputed, v_theta - 1 - v_b) for name, old in OLD_LOGPROBS.items()}
    assert found["engine"] is behavior and found["recomputed"] is recomputed
    share = ((v_theta - 1) - v_b) / (v_theta - v_b)
    torch.testing.assert_close(found["interpolated"], -3.0 + share * 2.0)
    assert not found["interpolated"].requires_grad


ROWS = [[1.0, 2.0], [4.0], [], [-3.0, 0.5, 8.0]]

TOTALS = Totals(num_tokens=6, num_sequences=3)

NORM = 7.0

AGGREGATED = {
    "token_mean": sum(sum(row) for row in ROWS) / 6,
    "sequence_mean": sum(sum(row) / len(row) for row in ROWS if row) / 3,
    "sequence_sum_token_norm": sum(sum(row) / NORM for row in ROWS) / 3,
    "constant": sum(sum(row) for row in ROWS) / NORM,
}


def padded(rows: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    """What is masked is NaN."""
    values = torch.full((len(rows), 3), math.nan, dtype=torch.float64)
    for n, row in enumerate(rows):
        values[n, : len(row)] = torch.tensor(row, dtype=torch.float64)
    return values, ~values.isnan()


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_an_aggregation_equals_its_reference(name: str) -> None:
    assert AGGREGATIONS[name](*padded(ROWS), TOTALS, NORM).item() == pytest.approx(AGGREGATED[name])


@pytest.mark.parametrize("split", [[1, 3], [2, 2], [1, 1, 1, 1], [4]])
@pytest.mark.parametrize("name", AGGREGATIONS)
def test_parts_add_up_to_the_whole(name: str, split: list[int]) -> None:
    """LightRFT defect B9: the loss was not divided by the number of accumulated micro-batches, so the gradient depended
    on how rows were split."""
    values, mask = padded(ROWS)
    pairs = zip(values.split(split), mask.split(split), strict=True)
    parts = sum(AGGREGATIONS[name](v, m, TOTALS, NORM).item() for v, m in pairs)
    assert parts == pytest.approx(AGGREGATED[name])


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_an_empty_mask_gives_zero_loss_and_zero_gradient(name: str) -> None:
    """LightRFT defect B3: the masked mean of a response without tokens was 0 / 0."""
    values = torch.full((2, 3), 5.0, requires_grad=True)
    loss = AGGREGATIONS[name](values, torch.zeros(2, 3, dtype=torch.bool), Totals(0, 0), NORM)
    loss.backward()
    assert loss.item() == 0 and values.grad.abs().max() == 0

"""Losses of a policy and of offline jobs, by hand."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mobula.configs.load import load_config
from mobula.learner.algorithms.corrections import by_age, truncated_importance
from mobula.learner.algorithms.offline_losses import PREFERENCE_LOSSES, SCORE_LOSSES
from mobula.learner.algorithms.policy_losses import POLICY_LOSSES, Totals, sequence_mean, token_mean

PARAMETERS: dict[str, dict[str, float]] = {
    "ppo_clip": {"clip_low": 0.2, "clip_high": 0.28},
    "dual_clip": {"clip_low": 0.2, "clip_high": 0.28, "bound": 3.0},
    "cpg": {"clip_low": 0.2, "clip_high": 0.3, "drift": 0.1},
    "gspo": {"clip_low": 0.02, "clip_high": 0.03},
    "gspo_token": {"clip_low": 0.02, "clip_high": 0.03},
    "gmpo": {"clip_low": 0.4, "clip_high": 0.3},
    "cispo": {"clip_low": 0.3, "clip_high": 0.5},
    "sapo": {"temperature_positive": 1.0, "temperature_negative": 1.05},
    "reinforce": {},
}

SEQUENCE_LOSSES = ("gspo", "gspo_token", "gmpo")

Row = tuple[list[float], list[float], list[float]]  # log-probs, old log-probs and advantages of a response's tokens


def clip(x: float, low: float, high: float) -> float:
    return max(low, min(x, high))


def token_by_token(formula: Callable[..., float]) -> Callable[..., list[float]]:
    def losses(row: Row, p: dict[str, float]) -> list[float]:
        return [formula(now, old, a, p) for now, old, a in zip(*row, strict=True)]

    return losses


def reference_ppo(now: float, old: float, a: float, p: dict[str, float]) -> float:
    r = math.exp(now - old)
    return -min(r * a, clip(r, 1 - p["clip_low"], 1 + p["clip_high"]) * a)


def reference_dual(now: float, old: float, a: float, p: dict[str, float]) -> float:
    """max(min(r A, clip(r) A), c A) for A < 0, as the paper writes it, negated."""
    inner = -reference_ppo(now, old, a, p)
    return -max(inner, p["bound"] * a) if a < 0 else -inner


def reference_cpg(now: float, old: float, a: float, p: dict[str, float]) -> float:
    d = now - old
    if a > 0:
        held = min(d, math.log(1 + p["clip_high"]))
    else:
        held = max(d, math.log(1 - p["clip_low"]))
    return -held * a + p["drift"] * (math.exp(d) - 1 - d)


def reference_cispo(now: float, old: float, a: float, p: dict[str, float]) -> float:
    return -clip(math.exp(now - old), 1 - p["clip_low"], 1 + p["clip_high"]) * a * now


def reference_sapo(now: float, old: float, a: float, p: dict[str, float]) -> float:
    k = p["temperature_positive"] if a > 0 else p["temperature_negative"]
    return -(4 / k) / (1 + math.exp(-k * (math.exp(now - old) - 1))) * a


def reference_gspo(row: Row, p: dict[str, float]) -> list[float]:
    now, old, advantages = row
    likelihoods = math.exp(sum(now)) / math.exp(sum(old))
    s = likelihoods ** (1 / len(now))
    return [-min(s * a, clip(s, 1 - p["clip_low"], 1 + p["clip_high"]) * a) for a in advantages]


def reference_gmpo(row: Row, p: dict[str, float]) -> list[float]:
    now, old, advantages = row
    product = 1.0
    for x, y, a in zip(now, old, advantages, strict=True):
        ratio, low, high = math.exp(x - y), math.exp(-p["clip_low"]), math.exp(p["clip_high"])
        product *= min(ratio, high) if a >= 0 else max(ratio, low)
    return [-a * product ** (1 / len(now)) for a in advantages]


REFERENCES: dict[str, Callable[[Row, dict[str, float]], list[float]]] = {
    "ppo_clip": token_by_token(reference_ppo),
    "dual_clip": token_by_token(reference_dual),
    "cpg": token_by_token(reference_cpg),
    "gspo": reference_gspo,
    "gspo_token": reference_gspo,
    "gmpo": reference_gmpo,
    "cispo": token_by_token(reference_cispo),
    "sapo": token_by_token(reference_sapo),
    "reinforce": token_by_token(lambda now, old, a, p: -a * now),
}


def loss_of(name: str) -> Callable[..., Any]:
    return partial(POLICY_LOSSES[name], **PARAMETERS[name])


def random_rows(seed: int, spread: float) -> list[Row]:
    rng = random.Random(seed)
    rows = []
    for _ in range(4):
        num = rng.randint(1, 6)
        old = [-rng.uniform(0.1, 4.0) for _ in range(num)]
        now = [x + rng.gauss(0, spread) for x in old]
        rows.append((now, old, [rng.choice([-1, 1]) * rng.choice([0.0, 0.5, 1e6])] * num))
    return rows


def padded(rows: list[Row]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    width = max(len(now) for now, _, _ in rows)
    columns = [[list(row[k]) + [0.0] * (width - len(row[k])) for row in rows] for k in range(3)]
    mask = torch.tensor([[t < len(row[0]) for t in range(width)] for row in rows])
    return (*(torch.tensor(column, dtype=torch.float64) for column in columns), mask)


def test_every_loss_has_a_reference_and_its_parameters_are_those_of_the_configuration() -> None:
    assert REFERENCES.keys() == PARAMETERS.keys() == POLICY_LOSSES.keys()
    losses = load_config(["experiment=digits"]).algorithm.losses.model_dump()
    for name, function in POLICY_LOSSES.items():
        keywords = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
        assert keywords == list(losses[name] if name in losses else [])


@pytest.mark.parametrize("spread", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_loss_equals_its_reference(name: str, spread: float) -> None:
    """LightRFT: GSPO and GMPO were flags without a formula."""
    for seed in range(10):
        rows = random_rows(seed, spread)
        logprobs, old, advantages, mask = padded(rows)
        found = loss_of(name)(logprobs, old, advantages, mask).loss
        expected = [loss for row in rows for loss in REFERENCES[name](row, PARAMETERS[name])]
        assert found[mask].tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("advantage", [0.7, -0.7])
@pytest.mark.parametrize("name", ["ppo_clip", "dual_clip", "cpg", "gspo", "gmpo", "sapo", "reinforce"])
def test_a_gradient_equals_finite_differences(name: str, advantage: float) -> None:
    logprobs = torch.tensor([[-1.0, -2.0, -0.4], [-1.5, -0.3, -9.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.1, -1.2, -0.39], [-1.51, -0.31, -9.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, True, False]])

    def total(x: Tensor) -> Tensor:
        loss = loss_of(name)(x, old, torch.full_like(old, advantage), mask).loss
        return token_mean(loss, mask, Totals(5, 2))

    assert torch.autograd.gradcheck(total, (logprobs,))


@pytest.mark.parametrize("advantage", [0.7, -0.7])
def test_the_gradient_of_cispo_is_that_of_log_probs_weighted_by_a_constant(advantage: float) -> None:
    now, old = [-1.0, -0.5, -3.0], [-1.5, -2.5, -1.0]
    logprobs = torch.tensor([now], dtype=torch.float64, requires_grad=True)
    mask = torch.ones(1, 3, dtype=torch.bool)
    out = loss_of("cispo")(logprobs, torch.tensor([old]), torch.full((1, 3), advantage), mask)
    out.loss.sum().backward()
    weights = [clip(math.exp(a - b), 0.7, 1.5) for a, b in zip(now, old, strict=True)]
    assert logprobs.grad[0].tolist() == pytest.approx([-w * advantage for w in weights])
    assert out.is_clipped.tolist() == [[True, True, True]], "the weight is clipped, the gradient is not lost"


def test_gspo_token_has_the_value_and_under_a_sequence_mean_the_gradient_of_gspo() -> None:
    rows = [([-1.0, -2.0, -0.4], [-1.01, -1.98, -0.41], [0.7] * 3), ([-0.2, -0.3], [-0.21, -0.3], [-1.0] * 2)]
    gradients = []
    for name in ("gspo", "gspo_token"):
        logprobs, old, advantages, mask = padded(rows)
        logprobs.requires_grad_()
        sequence_mean(loss_of(name)(logprobs, old, advantages, mask).loss, mask, Totals(5, 2)).backward()
        gradients.append(logprobs.grad)
    torch.testing.assert_close(gradients[0], gradients[1])
    assert gradients[0].abs().max() > 0.1


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_at_equal_policies_every_gradient_is_the_policy_gradient(name: str) -> None:
    logprobs = torch.tensor([[-1.0, -2.0, -0.5]], dtype=torch.float64, requires_grad=True)
    mask = torch.ones(1, 3, dtype=torch.bool)
    for advantage in (2.0, -2.0):
        loss = loss_of(name)(logprobs, logprobs.detach(), torch.full((1, 3), advantage).double(), mask).loss
        [gradient] = torch.autograd.grad(sequence_mean(loss, mask, Totals(3, 1)), logprobs)
        assert gradient[0].tolist() == pytest.approx([-advantage / 3] * 3)


@pytest.mark.parametrize("name", SEQUENCE_LOSSES)
def test_padding_has_no_part_in_a_sequence_ratio(name: str) -> None:
    rows = [([-1.0, -2.0], [-1.01, -1.98], [0.7] * 2)]
    logprobs, old, advantages, mask = padded(rows)
    alone = loss_of(name)(logprobs, old, advantages, mask).loss
    wide = [
        torch.cat([x, torch.full((1, 3), 5.0, dtype=torch.float64)], dim=1) for x in (logprobs, old - 1, advantages)
    ]
    wide[1][:, :2] = old
    longer = loss_of(name)(*wide, torch.tensor([[True, True, False, False, False]])).loss
    torch.testing.assert_close(longer[:, :2], alone)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_fully_masked_batch_has_loss_and_gradient_zero(name: str) -> None:
    """LightRFT defect B3: a response whose mask was 0 gave 0 / 0, and the whole batch was NaN."""
    logprobs = torch.full((2, 3), -1.0, dtype=torch.float64, requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    out = loss_of(name)(logprobs, torch.full((2, 3), -2.0).double(), torch.ones(2, 3).double(), mask)
    for aggregate in (token_mean, sequence_mean):
        [gradient] = torch.autograd.grad(aggregate(out.loss, mask, Totals(0, 0)), logprobs, retain_graph=True)
        assert gradient.abs().max() == 0


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_log_probs_far_apart_stay_finite(name: str) -> None:
    mask = torch.ones(2, 2, dtype=torch.bool)
    logprobs = torch.tensor([[0.0, -1e4], [-1e4, 0.0]], requires_grad=True)
    out = loss_of(name)(logprobs, torch.full((2, 2), -5e3), torch.tensor([[-1.0, -1.0], [1.0, 1.0]]), mask)
    out.loss.sum().backward()
    assert torch.isfinite(out.loss).all() and torch.isfinite(logprobs.grad).all()


def surrogate(ratio: float, advantage: float, name: str = "ppo_clip") -> tuple[float, float, bool]:
    """(loss, d loss / d logprob, is_clipped) of one token with clip range [0.8, 1.3]."""
    logprobs = torch.tensor([[math.log(ratio) - 2.0]], dtype=torch.float64, requires_grad=True)
    old, mask = torch.full((1, 1), -2.0, dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)
    more = {"bound": 3.0} if name == "dual_clip" else {}
    advantages = torch.tensor([[advantage]]).double()
    out = POLICY_LOSSES[name](logprobs, old, advantages, mask, clip_low=0.2, clip_high=0.3, **more)
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
def test_the_clip_in_every_region(ratio: float, advantage: float, expected: tuple[float, float, bool]) -> None:
    assert surrogate(ratio, advantage) == pytest.approx(expected)
    assert surrogate(ratio, advantage, "dual_clip") == pytest.approx(expected)


def test_the_second_clip_bounds_the_loss_of_a_bad_token_that_became_likely() -> None:
    assert surrogate(10.0, -2.0) == pytest.approx((20.0, 20.0, False))
    assert surrogate(10.0, -2.0, "dual_clip") == pytest.approx((6.0, 0.0, True))


def test_a_ratio_at_the_clip_is_not_counted_as_clipped() -> None:
    old, mask = torch.zeros(1, 2, dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool)
    logprobs = torch.tensor([[math.log(1.25), math.log(0.75)]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    exp = logprobs.exp()[0].tolist()
    out = POLICY_LOSSES["ppo_clip"](logprobs, old, advantages, mask, clip_low=1 - exp[1], clip_high=exp[0] - 1)
    assert not out.is_clipped.any()


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


def bradley_terry(chosen: float, rejected: float) -> float:
    """-log P(chosen wins) with P = exp(s_c) / (exp(s_c) + exp(s_r))."""
    top = max(chosen, rejected)
    return top + math.log(math.exp(chosen - top) + math.exp(rejected - top)) - chosen


BETAS = (0.01, 0.1, 2.0)
OFFLINE: dict[str, tuple[Callable[..., Tensor], Callable[[float, float], float]]] = {
    **{
        f"dpo, beta {beta}, smoothing {smoothing}": (
            partial(PREFERENCE_LOSSES["sigmoid"], beta=beta, label_smoothing=smoothing),
            partial(dpo, beta=beta, smoothing=smoothing),
        )
        for beta in BETAS
        for smoothing in (0.0, 0.1, 0.49)
    },
    **{
        f"ipo, beta {beta}": (partial(PREFERENCE_LOSSES["ipo"], beta=beta, label_smoothing=0.0), partial(ipo, tau=beta))
        for beta in BETAS
    },
    "bradley_terry": (SCORE_LOSSES["bradley_terry"], bradley_terry),
    "margin": (partial(SCORE_LOSSES["bradley_terry"], margin=0.7), lambda c, r: -log_sigmoid(c - r - 0.7)),
    "regression": (SCORE_LOSSES["regression"], lambda score, label: (score - label) ** 2),
}


@pytest.mark.parametrize("name", OFFLINE)
def test_an_offline_loss_equals_its_reference(name: str) -> None:
    loss, reference = OFFLINE[name]
    expected = [reference(c, r) for c, r in zip(CHOSEN.tolist(), REJECTED.tolist(), strict=True)]
    torch.testing.assert_close(
        loss(CHOSEN, REJECTED), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("name", OFFLINE)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    chosen, rejected = (5 * torch.randn(8, generator=RNG, dtype=torch.float64) for _ in range(2))
    assert torch.autograd.gradcheck(OFFLINE[name][0], (chosen.requires_grad_(), rejected.requires_grad_()))


@pytest.mark.parametrize("name", OFFLINE)
def test_losses_and_gradients_stay_finite_at_huge_margins(name: str) -> None:
    a, b = torch.tensor([1e4, -1e4]).requires_grad_(), torch.tensor([-1e4, 1e4]).requires_grad_()
    value = OFFLINE[name][0](a, b)
    value.sum().backward()
    assert value.isfinite().all() and a.grad.isfinite().all() and b.grad.isfinite().all()

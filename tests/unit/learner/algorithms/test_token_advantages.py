"""Advantages of tokens and turns, and the loss of values."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from sklearn.metrics import explained_variance_score

from mobula.configs.schema.algorithm import TURNWISE, VALUED
from mobula.learner.algorithms.token_advantages import (
    TOKEN_ADVANTAGES,
    TURN_ADVANTAGES,
    StepTurns,
    TokenValues,
    explained_variance,
    return_to_go,
    turn_gae,
    turns_of,
    value_loss,
)
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
    """LightRFT defects B11, B15: gamma was used on the first micro-batch only, and the finish reason was lost, so that
    responses that were cut off and that ended were treated alike."""
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


def test_every_advantage_that_reads_values_has_a_formula_for_tokens() -> None:
    assert sorted(TOKEN_ADVANTAGES) == sorted(VALUED)


# State, action -> reward and next state; None ends the episode. "on" leads on, "off" ends early in some states.
MDP: dict[int, dict[str, tuple[float, int | None]]] = {
    0: {"on": (0.3, 1), "off": (1.0, None)},
    1: {"on": (-0.5, 2), "off": (0.2, 0)},
    2: {"on": (2.0, None), "off": (0.0, None)},
}

POLICY = {0: 0.6, 1: 0.3, 2: 0.8}  # probability of "on"

MAX_TURNS = 3

Episode = tuple[float, list[tuple[int, str, float]]]  # its probability; state, action and reward of each turn


def episodes(state: int = 0, turn: int = 0) -> Iterator[Episode]:
    for action, (reward, after) in MDP[state].items():
        chance = POLICY[state] if action == "on" else 1 - POLICY[state]
        if after is None or turn + 1 == MAX_TURNS:
            yield chance, [(state, action, reward)]
            continue
        for rest_chance, rest in episodes(after, turn + 1):
            yield chance * rest_chance, [(state, action, reward), *rest]


def score(state: int, action: str) -> np.ndarray:
    """The gradient of log pi(action) by the logit of "on" in each state, float64 [3]."""
    gradient = np.zeros(3)
    gradient[state] = (1 - POLICY[state]) if action == "on" else -POLICY[state]
    return gradient


def steps(group: tuple[Episode, ...]) -> StepTurns:
    longest = max(len(turns) for _, turns in group)
    rewards = [[reward for _, _, reward in turns] + [0.0] * (longest - len(turns)) for _, turns in group]
    num = np.array([len(turns) for _, turns in group])
    return StepTurns(np.array(rewards), num, np.ones(len(group), bool), np.zeros(len(group), int))


def expected_gradient(advantages: Callable[[StepTurns, float], np.ndarray], num_siblings: int) -> np.ndarray:
    """The mean over all groups of siblings of the mean sibling's sum of advantage times score."""
    total = np.zeros(3)
    for group in itertools.product(list(episodes()), repeat=num_siblings):
        chance = math.prod(part for part, _ in group)
        found = advantages(steps(group), 1.0)
        for row, (_, turns) in zip(found, group, strict=True):
            for advantage, (state, action, _) in zip(row, turns, strict=False):
                total += chance * advantage * score(state, action) / num_siblings
    return total


def true_gradient() -> np.ndarray:
    """Of the expected sum of rewards: every reward times the scores of all turns of its episode."""
    return sum(
        chance * sum(reward for *_, reward in turns) * sum(score(state, action) for state, action, _ in turns)
        for chance, turns in episodes()
    )


def test_the_policy_gradient_of_return_to_go_is_unbiased_by_enumeration() -> None:
    assert sum(chance for chance, _ in episodes()) == pytest.approx(1)
    for num_siblings in (2, 3):
        assert expected_gradient(return_to_go, num_siblings).tolist() == pytest.approx(true_gradient().tolist())


def test_a_mean_over_the_siblings_that_reach_a_turn_would_be_biased() -> None:
    """The enumeration can tell: normalising by the index of the turn (verl issue 7244) is another gradient."""

    def by_index(turns: StepTurns, discount: float) -> np.ndarray:
        own = np.cumsum(turns.rewards[:, ::-1], axis=1)[:, ::-1]
        reached = np.arange(own.shape[1]) < turns.num_turns[:, None]
        mean = (own * reached).sum(axis=0) / np.maximum(reached.sum(axis=0), 1)
        return np.where(reached, own - mean, 0.0)

    biased, unbiased = expected_gradient(by_index, 2), true_gradient()
    scale = (biased @ unbiased) / (unbiased @ unbiased)  # a baseline that includes i shrinks the gradient at least
    assert np.abs(biased / scale - unbiased).max() > 0.02


def test_return_to_go_finds_siblings_by_id_and_leaves_out_what_has_no_reward() -> None:
    rewards = np.array([[1.0, 2.0, 4.0], [8.0, 0.0, 0.0], [1.0, 1.0, 0.0], [9.0, 9.0, 9.0], [3.0, 5.0, 0.0]])
    turns = StepTurns(rewards, np.array([3, 1, 2, 3, 2]), np.array([1, 1, 1, 0, 1], bool), np.array([7, 4, 7, 7, 4]))
    found = return_to_go(turns, 0.5)
    expected = [[3 - 1.5, 4 - 1, 4], [8 - 5.5, 0, 0], [1.5 - 3, 1 - 4, 0], [0, 0, 0], [5.5 - 8, 5, 0]]
    np.testing.assert_allclose(found, expected)


def test_turn_gae_equals_its_definition_on_random_episodes() -> None:
    rng = random.Random(1)
    for _ in range(100):
        lengths = [rng.randint(1, 4) for _ in range(rng.randint(1, 5))]
        mask = [part for n in lengths for part in [*[True] * n, *[False] * rng.randint(1, 3)]]
        rewards = [rng.gauss(0, 1) if chosen else 0.0 for chosen in mask]
        values = np.array([rng.gauss(0, 2) for _ in range(len(mask) + 1)], np.float32)
        is_truncated, gamma, gae_lambda = rng.random() < 0.5, rng.choice([1.0, 0.9]), rng.choice([0.0, 0.7, 1.0])
        of = TokenValues(np.array(rewards), values, np.array(mask), is_truncated)
        found = turn_gae(of, gamma, gae_lambda)
        turns = turns_of(of.mask)
        assert [end - start for start, end in turns] == lengths
        paid = [sum(rewards[start:end]) for start, end in turns]
        before = [float(values[start]) for start, _ in turns] + [float(values[-1]) if is_truncated else 0.0]
        deltas = [r + gamma * after - v for r, v, after in zip(paid, before, before[1:], strict=False)]
        for k, (start, end) in enumerate(turns):
            advantage = sum((gamma * gae_lambda) ** (j - k) * deltas[j] for j in range(k, len(deltas)))
            assert found.advantages[start:end].tolist() == pytest.approx([advantage] * (end - start))
            assert found.returns[start:end].tolist() == pytest.approx([advantage + before[k]] * (end - start))
        assert not found.advantages[~of.mask].any() and not found.returns[~of.mask].any()


def test_every_advantage_of_turns_has_a_formula() -> None:
    assert sorted(TURNWISE) == sorted((*TURN_ADVANTAGES, "turn_gae")) and "turn_gae" in VALUED


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

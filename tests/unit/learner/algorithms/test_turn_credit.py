"""Credit of turns: return-to-go is unbiased, by enumeration; GAE over turns equals its definition in plain Python."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from mobula.configs.schema.algorithm import TURNWISE, VALUED
from mobula.learner.algorithms.token_advantages import (
    TURN_ADVANTAGES,
    StepTurns,
    TokenValues,
    return_to_go,
    turn_gae,
    turns_of,
)

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

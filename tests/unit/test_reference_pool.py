"""The reference pool scores every group once, on any number of scorers, and gives them back in order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from fakes import make_scored
from handles import LocalHandle, never

from actors.reference_pool import NullReference, ReferencePool
from cluster.errors import DeadlineError
from cluster.trajectory import ScoredGroup

FOLDER = Path("run/reference")


class FakeScorer:
    """Scores each token with the negative length of the group's id."""

    def __init__(self) -> None:
        self.loaded: list[Path] = []
        self.scored: list[list[str]] = []

    def load(self, folder: Path) -> None:
        self.loaded.append(folder)

    def score(self, groups: Sequence[ScoredGroup]) -> list[list[np.ndarray]]:
        assert self.loaded, "a scorer is asked only once it has its policy"
        self.scored.append([group.summary.group_id for group in groups])
        return [expected(group) for group in groups]

    def score_one(self, group: ScoredGroup) -> list[np.ndarray]:
        return self.score([group])[0]


def expected(group: ScoredGroup) -> list[np.ndarray]:
    """One array a trajectory."""
    value = -float(len(group.summary.group_id))
    return [np.full(trajectory.num_steps, value) for trajectory in group.group.trajectories]


def pool(scorers: Sequence[object], timeout_s: float = 5) -> ReferencePool:
    return ReferencePool([LocalHandle(scorer) for scorer in scorers], FOLDER, timeout_s=timeout_s)


@pytest.mark.parametrize("num_scorers", [1, 2, 3])
@pytest.mark.parametrize("num_groups", [1, 2, 3, 4, 7])
async def test_every_group_gets_one_array_a_trajectory_in_order(num_scorers: int, num_groups: int) -> None:
    scorers = [FakeScorer() for _ in range(num_scorers)]
    groups = [make_scored(f"0/{n}/" + "s" * (n + 1)) for n in range(num_groups)]
    scored = await pool(scorers).score(groups)
    assert [g.summary.group_id for g in scored] == [g.summary.group_id for g in groups]
    for group in scored:
        found = await group.reference_logprobs.future()
        assert len(found) == len(group.group.trajectories)
        for ours, theirs in zip(found, expected(group), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    shares = [len(share) for scorer in scorers for share in scorer.scored]
    assert sum(shares) == num_groups
    assert max(shares) - min(shares) <= 1


async def test_the_frozen_policy_is_loaded_once_by_every_scorer() -> None:
    scorers = [FakeScorer(), FakeScorer()]
    reference = pool(scorers)
    for _ in range(3):
        await reference.score([make_scored("0/0/s0"), make_scored("0/1/s1")])
    assert [scorer.loaded for scorer in scorers] == [[FOLDER], [FOLDER]]


async def test_a_scorer_that_does_not_answer_is_named() -> None:
    class Silent(FakeScorer):
        score_one = staticmethod(never)

    with pytest.raises(DeadlineError, match=r"waited 0\.05 s for reference/0 to score 1 groups"):
        await pool([Silent()], timeout_s=0.05).score([make_scored("0/0/s0")])


async def test_a_scorer_that_cannot_load_is_named() -> None:
    class Silent(FakeScorer):
        load = staticmethod(never)

    with pytest.raises(DeadlineError, match="reference/0 to load run/reference"):
        await pool([Silent()], timeout_s=0.05).score([make_scored("0/0/s0")])


async def test_without_a_reference_groups_pass_as_they_are() -> None:
    groups = [make_scored("0/0/s0")]
    assert await NullReference().score(groups) == groups
    assert groups[0].reference_logprobs is None

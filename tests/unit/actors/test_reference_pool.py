"""Scorers of the reference: shares, losses, and a reference in 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import AT_ONCE, FakeHosts, LocalHandle, make_scored, never, settle
from learner_data import random_groups, tiny_config
from transformers import AutoTokenizer

from mobula.actors.reference.pool import DIED, HUNG, NullReference, ReferencePool
from mobula.actors.reference.scorer import ReferenceScorer, num_weight_bytes, quantise
from mobula.cluster.errors import DeadlineError, ScoringError, WorkerDiedError
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.learner.policies.checkpoint import load_policy_model
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

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

    def ping(self) -> bool:
        return True


def expected(group: ScoredGroup) -> list[np.ndarray]:
    """One array a trajectory."""
    value = -float(len(group.summary.group_id))
    return [np.full(trajectory.num_steps, value) for trajectory in group.group.trajectories]


def no_scorer(index: int) -> Any:
    raise AssertionError(f"scorer {index} was replaced")


def pool(
    scorers: Sequence[object],
    timeout_s: float = 5,
    max_attempts: int = 1,
    start: Callable[[int], Any] = no_scorer,
    on_lost: Callable[[str], None] = lambda kind: None,
    on_retry: Callable[[str], None] = lambda kind: None,
) -> ReferencePool:
    return ReferencePool(
        [LocalHandle(scorer) for scorer in scorers],
        FOLDER,
        hosts=FakeHosts(lambda index: LocalHandle(start(index)), booked=len(scorers)),
        restarts=AT_ONCE,
        alive_s=0.05,
        timeout_s=timeout_s,
        max_attempts=max_attempts,
        on_lost=on_lost,
        on_retry=on_retry,
    )


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


@pytest.mark.parametrize(
    ("method", "message"),
    [("score_one", r"waited 0\.05 s for reference/0 to score 1 groups"), ("load", "reference/0 to load run/reference")],
)
async def test_a_scorer_that_does_not_answer_is_named(method: str, message: str) -> None:
    silent = type("Silent", (FakeScorer,), {method: staticmethod(never), "ping": staticmethod(never)})
    with pytest.raises(DeadlineError, match=message):
        await pool([silent()], timeout_s=0.05).score([make_scored("0/0/s0")])


class Dying(FakeScorer):
    """Its process ends whenever it is asked."""

    def score(self, groups: Sequence[ScoredGroup]) -> list[list[np.ndarray]]:
        raise WorkerDiedError("its process ended")


class Newcomers:
    """Scorers that are made while the run goes on."""

    def __init__(self) -> None:
        self.scorers: list[FakeScorer] = []

    def start(self, index: int) -> FakeScorer:
        self.scorers.append(FakeScorer())
        return self.scorers[-1]


async def test_a_lost_scorer_is_replaced_and_its_groups_are_scored_by_another() -> None:
    newcomers, healthy, restarts, retries = Newcomers(), FakeScorer(), [], []
    reference = pool(
        [Dying(), healthy], start=newcomers.start, max_attempts=2, on_lost=restarts.append, on_retry=retries.append
    )
    groups = [make_scored(f"0/{n}/s{n}") for n in range(5)]
    scored = await reference.score(groups)
    assert [group.summary.group_id for group in scored] == [group.summary.group_id for group in groups]
    for group in scored:
        for ours, theirs in zip(await group.reference_logprobs.future(), expected(group), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert reference.losses == {DIED: 1, HUNG: 0}
    assert (restarts, retries) == ([DIED], ["WorkerDiedError"])
    await settle()
    assert [worker.num_restarts for worker in reference.pool.status()] == [1, 0]
    assert newcomers.scorers[0].loaded == [FOLDER], "it has the frozen policy before it is given work"


class LosesReplies(FakeScorer):
    """The first `num` replies are lost, and it is free again."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self._num = num

    async def score_one(self, group: ScoredGroup) -> list[np.ndarray]:
        logprobs = super().score_one(group)
        return await never() if len(self.scored) <= self._num else logprobs


async def test_a_scorer_that_loses_a_reply_is_not_replaced_and_its_groups_are_scored_again() -> None:
    forgetful, retries = LosesReplies(1), []
    reference = pool([forgetful], timeout_s=0.05, max_attempts=2, on_retry=retries.append)
    await reference.score([make_scored("0/0/s0")])
    assert (forgetful.loaded, forgetful.scored) == ([FOLDER], [["0/0/s0"]] * 2)
    assert reference.losses == {DIED: 0, HUNG: 0}
    assert retries == ["LostReplyError"]


async def test_groups_that_kill_every_scorer_end_in_an_error_not_in_a_loop() -> None:
    reference = pool([Dying()], start=lambda index: Dying(), max_attempts=3)
    with pytest.raises(WorkerDiedError, match="its process ended"):
        await reference.score([make_scored("0/0/s0"), make_scored("0/1/s1")])
    assert reference.losses[DIED] == 3


async def test_a_scorer_that_cannot_get_at_its_groups_is_not_replaced() -> None:
    class Starved(FakeScorer):
        def score(self, groups: Sequence[ScoredGroup]) -> list[list[np.ndarray]]:
            raise ScoringError("waited 60 s for trajectory groups")

    reference = pool([Starved()], max_attempts=3)
    with pytest.raises(ScoringError, match="trajectory groups"):
        await reference.score([make_scored("0/0/s0")])
    assert reference.losses == {DIED: 0, HUNG: 0}


async def test_the_shares_follow_the_number_of_scorers() -> None:
    newcomers, first = Newcomers(), FakeScorer()
    reference = pool([first], start=newcomers.start)
    groups = [make_scored(f"0/{n}/s{n}") for n in range(4)]
    await reference.score(groups)
    await reference.pool.scale(2)
    await settle()
    assert newcomers.scorers[0].loaded == [FOLDER]
    await reference.score(groups)
    await reference.pool.scale(1)
    await settle()
    await reference.score(groups)
    assert [len(share) for share in first.scored] == [4, 2, 4]
    assert [len(share) for share in newcomers.scorers[0].scored] == [2]
    assert newcomers.scorers[0].loaded == [FOLDER]


async def test_a_scorer_that_joins_before_there_is_a_frozen_policy_loads_it_when_it_is_asked() -> None:
    newcomers = Newcomers()
    reference = pool([FakeScorer()], start=newcomers.start)
    await reference.pool.scale(2)
    await settle()
    assert newcomers.scorers[0].loaded == []
    await reference.score([make_scored("0/0/s0"), make_scored("0/1/s1")])
    assert (newcomers.scorers[0].loaded, len(newcomers.scorers[0].scored)) == ([FOLDER], 1)


async def test_without_a_reference_groups_pass_as_they_are() -> None:
    groups = [make_scored("0/0/s0")]
    assert await NullReference().score(groups) == groups
    assert groups[0].reference_logprobs is None


pytest.importorskip("torchao")
KL = ("algorithm.kl.coef=0.01",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny"), seed=0, tie_word_embeddings=False)


def test_a_scorer_in_8_bits_is_close_to_one_in_full_precision_and_smaller(folder: Path) -> None:
    groups = random_groups(AutoTokenizer.from_pretrained(folder), 3, 2)  # none, one and two images
    found, sizes = {}, {}
    for kind in ("none", "int8"):
        scorer = ReferenceScorer(tiny_config(folder, *KL, f"reference.scorers.quantisation={kind}"), ())
        scorer.load(folder)
        found[kind] = np.concatenate([row for rows in scorer.score(groups) for row in rows])
        sizes[kind] = num_weight_bytes(scorer._policy)
    error = np.abs(found["int8"] - found["none"])
    assert 0 < error.mean() < 0.05
    assert error.max() < 0.3
    assert sizes["int8"] < 0.8 * sizes["none"], "the vocabulary's two matrices, which stay, are much of a tiny model"


def test_rows_are_rounded_to_127_steps_of_their_largest_value(folder: Path) -> None:
    """The definition: w is within half a step of what it was, the step being max |w| / 127 of its row (symmetric)."""
    model, plain = (load_policy_model(tiny_config(folder).policy, torch.float32) for _ in range(2))
    quantise(model, "int8")
    weights = dict(plain.named_parameters())
    num_rounded = 0
    for name, parameter in model.named_parameters():
        if type(parameter.data) is torch.Tensor:
            torch.testing.assert_close(parameter, weights[name], atol=0, rtol=0)
            continue
        num_rounded += 1
        step = weights[name].abs().amax(dim=1, keepdim=True) / 127
        assert ((parameter.dequantize() - weights[name]).abs() <= 0.51 * step + 1e-9).all(), name
    assert num_rounded >= 10
    assert type(model.get_output_embeddings().weight.data) is torch.Tensor

"""A step that lost something is made whole from the journal where it has it, else by sampling again; no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import FakePrompts, make_group, make_prompt, make_scored
from runs import AtOnce

from mobula.cluster.errors import JournalError, LostObjectError
from mobula.cluster.records.trajectory import Reward, ScoredGroup
from mobula.cluster.recovery.lost_groups import GroupRegenerator, RegeneratingReference
from mobula.cluster.recovery.step_learner import StepLearner
from mobula.cluster.replay.buffer import LiveGroups, ReplayBuffer
from mobula.cluster.replay.journal import Journal, finished, trained
from mobula.cluster.replay.journal_writer import JournalWriter
from mobula.cluster.roles import UpdateReport
from mobula.cluster.rollout.dispatcher import MAX_NODES_LOST
from mobula.cluster.runtime.object_store import fetch

LOST = "went with its node"
IDS = ("0/0/s0", "0/1/s1", "0/2/s2")


def fetch_or_lose(references: Sequence[Any], *, timeout_s: float, what: str) -> list[Any]:
    if any(isinstance(reference, str) for reference in references):
        raise LostObjectError(f"{what} cannot be had")
    return fetch(references, timeout_s=timeout_s, what=what)


def fetch_what_is_there(wanted: Sequence[Sequence[Any]], *, wait_s: float) -> list[Sequence[Any] | None]:
    return [None if any(isinstance(r, str) for r in references) else references for references in wanted]


def lost(group: ScoredGroup) -> ScoredGroup:
    return replace(group, group=LOST)


class Bench:
    """A buffer with a journal, in which the groups of a step are leased."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("mobula.cluster.recovery.lost_groups.fetch_or_miss", fetch_or_lose)
        monkeypatch.setattr("mobula.cluster.replay.journal_writer.fetch_or_miss", fetch_or_lose)
        monkeypatch.setattr("mobula.cluster.replay.journal_writer.fetch_at_hand", fetch_what_is_there)
        self.journal = Journal(folder, {})
        self.replay = ReplayBuffer(journal=JournalWriter(self.journal, timeout_s=5, start_thread=AtOnce))
        self.sampled_again: list[str] = []
        self.counted: list[str] = []
        self.regenerator = GroupRegenerator(
            self.replay,
            LiveGroups(FakePrompts(), put=lambda value: value),
            self._sample_again,
            timeout_s=5,
            on_lost=self.counted.append,
        )

    async def leased(self, *groups: ScoredGroup) -> list[ScoredGroup]:
        await self.replay.put(groups)
        return await self.replay.take(len(groups))

    async def _sample_again(self, prompt_id: str) -> ScoredGroup:
        self.sampled_again.append(prompt_id)
        group = make_group(make_prompt(prompt_id), versions=(3, 3, 3, 3))
        return ScoredGroup(group.summary(), group, (Reward(2.0), Reward(3.0)))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


async def test_what_the_journal_has_comes_from_there_and_the_rest_is_sampled_again(bench: Bench) -> None:
    whole, written, gone = (make_scored(group_id) for group_id in IDS)
    await bench.leased(whole, written, lost(gone))
    num_bytes = (await bench.replay.stats()).num_bytes
    step = [whole, lost(written), lost(gone)]
    regenerated = await bench.regenerator.regenerate(step)
    assert [group.summary.group_id for group in regenerated] == list(IDS)
    assert regenerated[0] is whole and regenerated[1].rewards == written.rewards
    assert regenerated[1].group.trajectories[0].response == written.group.trajectories[0].response
    assert (bench.sampled_again, bench.counted) == ([IDS[2]], ["LostObjectError"])
    assert regenerated[2].summary.oldest_version == 3
    assert (await bench.replay.stats()).num_bytes == num_bytes - gone.summary.num_bytes + regenerated[
        2
    ].summary.num_bytes
    await bench.replay.commit(4, regenerated)  # what was sampled again is on disk as well
    assert [group.group_id for group in bench.journal.recover(3).steps[0].groups] == list(IDS)
    await bench.replay.release(regenerated)
    assert (await bench.replay.stats()).num_bytes == 0


async def test_log_probs_that_are_lost_alone_are_dropped_and_the_group_is_left_as_it_is(bench: Bench) -> None:
    group = replace(make_scored(IDS[0]), reference_logprobs=LOST)
    [regenerated] = await bench.regenerator.regenerate(await bench.leased(group))
    assert regenerated == replace(group, reference_logprobs=None) and bench.sampled_again == []


async def test_a_trained_step_comes_with_its_log_probs_from_the_journal_or_not_at_all(bench: Bench) -> None:
    group = make_scored(IDS[0])
    logprobs = [t.behavior_logprobs - 1 for t in group.group.trajectories]
    bench.journal.append([finished(group.group, group.rewards), trained(1, [IDS[0]], [logprobs])])
    [recalled] = await bench.regenerator.recall([lost(group)])
    assert recalled.rewards == group.rewards
    assert [list(of_one) for of_one in recalled.reference_logprobs] == [list(of_one) for of_one in logprobs]
    with pytest.raises(LostObjectError, match=f"{IDS[1]} were trained and then lost with their node"):
        await bench.regenerator.recall([lost(group), lost(make_scored(IDS[1]))])
    assert bench.sampled_again == []


class Picky:
    """A reference and a learner that need every group and all log-probs; `losses` more of its calls find one lost."""

    def __init__(self, losses: int = 0) -> None:
        self.losses = losses
        self.scored: list[list[str]] = []
        self.learned: list[list[ScoredGroup]] = []

    async def score(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        self._look(groups)
        self.scored.append([group.summary.group_id for group in groups])
        return [replace(group, reference_logprobs=[0.0]) for group in groups]

    async def update(self, groups: Sequence[ScoredGroup]) -> UpdateReport:
        self._look(groups)
        fetch_or_lose([group.reference_logprobs for group in groups], timeout_s=1, what="log-probs")
        self.learned.append(list(groups))
        return UpdateReport(1, {})

    def _look(self, groups: Sequence[ScoredGroup]) -> None:
        fetch_or_lose([group.group for group in groups], timeout_s=1, what="groups")
        self.losses -= 1
        if self.losses >= 0:
            raise LostObjectError("one of them, on the way")


async def test_a_step_is_regenerated_before_its_score_and_before_its_update_where_only_what_is_new_is_scored(
    bench: Bench,
) -> None:
    roles = Picky()
    reference = RegeneratingReference(roles, bench.regenerator)
    first, second, third = await bench.leased(lost(make_scored(IDS[0])), *(make_scored(i) for i in IDS[1:]))
    first, second, third = await reference.score([first, second, third])
    assert roles.scored == [list(IDS)] and bench.sampled_again == [IDS[0]]
    step = [first, lost(second), replace(third, reference_logprobs=LOST)]
    await StepLearner(roles, regenerate=reference.regenerate).update(step)
    assert roles.scored[1:] == [[IDS[1], IDS[2]]]
    [learned] = roles.learned
    assert [group.summary.group_id for group in learned] == list(IDS) and bench.sampled_again == [IDS[0]]


async def test_without_a_reference_nothing_is_scored(bench: Bench) -> None:
    roles = Picky()
    step = await bench.leased(lost(make_scored(IDS[0])), make_scored(IDS[1]))
    reference = RegeneratingReference(roles, bench.regenerator)
    await StepLearner(roles, regenerate=reference.regenerate).update(step)
    assert roles.scored == [] and len(roles.learned) == 1


@pytest.mark.parametrize("losses", [MAX_NODES_LOST, MAX_NODES_LOST + 1])
async def test_a_step_that_is_lost_again_and_again_ends_the_run(bench: Bench, losses: int) -> None:
    step = await bench.leased(make_scored(IDS[0]))
    roles = Picky(losses)
    learner = StepLearner(roles, regenerate=RegeneratingReference(roles, bench.regenerator).regenerate)
    if losses > MAX_NODES_LOST:
        with pytest.raises(LostObjectError):
            await learner.update(step)
    else:
        assert (await learner.update(step)).version == 1


async def test_a_group_that_the_learner_had_and_the_journal_missed_is_written_down_or_ends_the_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another group in its place would not be the one that was trained."""
    step = await bench.leased(lost(make_scored(IDS[0])))

    class Learner:
        async def update(self, groups: Sequence[ScoredGroup]) -> UpdateReport:
            return UpdateReport(1, {})

    with pytest.raises(JournalError, match="resume=auto"):
        await StepLearner(Learner(), journal=bench.replay).update(step)
    there = {LOST: make_scored(IDS[0]).group}
    monkeypatch.setattr(
        "mobula.cluster.replay.journal_writer.fetch_or_miss",
        lambda found, **rest: [there.get(one, one) for one in found],
    )
    assert (await StepLearner(Learner(), journal=bench.replay).update(step)).version == 1
    assert bench.journal.recover(0).reached == 1

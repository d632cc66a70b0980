"""A run continues from checkpoint and journal, and groups that were lost with a node are made again."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import FakeLearner, FakeMetrics, FakePrompts, make_group, make_prompt, make_scored
from group_data import KnownPrompts, OneRank, numbered
from learner_data import random_groups, tiny_config
from runs import AtOnce
from transformers import AutoTokenizer

from mobula.cluster.errors import JournalError, LostObjectError, SkippedSample
from mobula.cluster.records.trajectory import Reward, ScoredGroup
from mobula.cluster.recovery.resume import JournalRecovery, NoRecovery
from mobula.cluster.recovery.step_learner import GroupRegenerator, RegeneratingReference, StepLearner
from mobula.cluster.replay.buffer import LiveGroups, ReplayBuffer
from mobula.cluster.replay.journal import Journal, JournalRecord, finished, trained
from mobula.cluster.replay.journal_writer import JournalWriter
from mobula.cluster.roles import Learner as LearnerRole
from mobula.cluster.roles import UpdateReport
from mobula.cluster.rollout.dispatcher import MAX_NODES_LOST
from mobula.cluster.rollout.staleness import AgeLimit
from mobula.cluster.runtime.object_store import fetch
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl


class RecordingDispatcher:
    """Records the arguments of `catch_up`; `closed` prompts were settled before the checkpoint."""

    def __init__(self, closed: Sequence[str] = ()) -> None:
        self.caught_up: tuple[int, list[str], list[str]] | None = None
        self._closed = closed
        self.shown: list[list[tuple[str, str | None]]] = []

    def is_open(self, prompt_id: str) -> bool:
        return prompt_id not in self._closed

    def show(self, arrivals: Iterable[JournalRecord]) -> None:
        self.shown.append([(arrival.group_id, arrival.reason) for arrival in arrivals])

    def advanced(self) -> None: ...

    def catch_up(self, version: int, settled: Iterable[str], finished_of_resume: Sequence[ScoredGroup]) -> None:
        self.caught_up = (version, list(settled), [group.summary.group_id for group in finished_of_resume])


class Bench:
    """A journal in `folder`, written by one run and recovered by the next."""

    def __init__(
        self, folder: Path, learner: LearnerRole, prompts: KnownPrompts, *, closed: Sequence[str] = ()
    ) -> None:
        self.journal = Journal(folder / "journal", {})
        self.replay = ReplayBuffer(journal=JournalWriter(Journal(folder / "journal", {}), timeout_s=5))
        self.dispatcher = RecordingDispatcher(closed)
        self.metrics = FakeMetrics()
        self.learner = StepLearner(learner, journal=self.replay)
        self.counts: dict[str, int] = {}
        self.recovery = JournalRecovery(
            self.journal, learner=self.learner, groups=LiveGroups(prompts, put=lambda value: value),
            dispatcher=self.dispatcher, replay=self.replay, metrics=self.metrics, age_limit=AgeLimit(1),
            on_recovered=self.counts.update,
        )  # fmt: skip

    async def train(self, groups: Sequence[ScoredGroup]) -> None:
        """One step of the loop."""
        for group in groups:
            await self.replay.put([group])
        taken = await self.replay.take(len(groups))
        scored = zip(taken, groups, strict=True)
        await self.learner.update([dataclasses.replace(t, reference_logprobs=g.reference_logprobs) for t, g in scored])
        await self.replay.release(taken)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny"), seed=0)


OF_GROUPS = ["algorithm.prompt_history_steps=3", "algorithm.shaping.running_moments=standardise"]


@pytest.mark.parametrize(
    "words",
    [["learner.schedule=linear"], [*OF_GROUPS, "algorithm.kl.controller=adaptive", "algorithm.kl.target=0.01"]],
    ids=["plain", "history, moments and adaptive KL"],
)
async def test_a_learner_that_repeats_steps_has_equal_weights(model: Path, tmp_path: Path, words: list[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    steps = [numbered(random_groups(tokenizer, 3, 4, seed), 3 * seed) for seed in range(4)]
    prompts = KnownPrompts(group for step in steps for group in step)
    config = tiny_config(model, "algorithm.kl.coef=0.1", "resources.reference.num_workers=1", *words)
    first = OneRank(config)
    run = Bench(tmp_path, first, prompts)
    await run.recovery.begin()
    await run.train(steps[0])
    first.rank.save(tmp_path / "state")
    first.rank.finish_save()
    after_checkpoint = first.weights()
    for groups in steps[1:]:
        await run.train(groups)
    await run.replay.close()

    second = OneRank(config)
    assert second.rank.load(tmp_path / "state") == 1
    resumed = Bench(tmp_path, second, prompts)
    assert await resumed.recovery.recover(1) == 4
    ours, theirs = second.weights(), first.weights()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert any(not torch.equal(after_checkpoint[name], theirs[name]) for name in theirs), "nothing was trained"
    for p, q in zip(second.rank._optimizer.state.values(), first.rank._optimizer.state.values(), strict=True):
        assert torch.equal(p["exp_avg_sq"], q["exp_avg_sq"])
    assert second.rank._credit.state() == first.rank._credit.state()
    assert resumed.dispatcher.caught_up == (4, [g.summary.group_id for step in steps[1:] for g in step], [])


async def finished_of_resume(folder: Path, groups: Sequence[ScoredGroup]) -> None:
    """A run that was killed at version 0 with these groups finished."""
    run = Bench(folder, FakeLearner(), KnownPrompts())
    await run.recovery.begin()
    for group in groups:
        await run.replay.reserve(group)
    await run.replay.close()


async def test_finished_groups_go_back_into_the_stream_with_live_prompts(tmp_path: Path) -> None:
    groups = [make_scored("0/1/s1"), make_scored("0/0/s0")]
    await finished_of_resume(tmp_path, groups)
    again = Bench(tmp_path, FakeLearner(), KnownPrompts(groups))
    assert await again.recovery.recover(0) == 0
    version, settled, found = again.dispatcher.caught_up
    assert (version, settled, sorted(found)) == (0, [], ["0/0/s0", "0/1/s1"])
    assert again.counts == {"steps": 0, "groups": 2}


async def test_a_finished_group_of_changed_data_is_named_and_sampled_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    groups = [make_scored(f"0/{n}/s{n}") for n in range(3)]
    await finished_of_resume(tmp_path, groups)
    prompt = dataclasses.replace(make_prompt("0/1/s1"), expanded_ids=np.array([1, 2, 4], dtype=np.int32))
    changed = dataclasses.replace(groups[1], group=make_group(prompt))
    again = Bench(tmp_path, FakeLearner(), KnownPrompts([groups[0], changed, groups[2]], broken=["0/2/s2"]))
    await again.recovery.recover(0)
    assert again.dispatcher.caught_up == (0, [], ["0/0/s0"])
    assert again.counts == {"steps": 0, "groups": 1, "changed_data": 1, "bad_media": 1}
    assert "prompt 0/1/s1 has other tokens than when it was sampled: restore the row s1" in caplog.text
    finished = [group.group_id for group in again.journal.recover(0).finished]
    assert finished == ["0/0/s0"], "a second kill does not bring it back"


async def test_groups_of_lost_weights_or_beyond_the_bound_are_counted_and_sampled_again(tmp_path: Path) -> None:
    async def recover(version: int, name: str) -> dict[str, int]:
        group = make_group(make_prompt("0/0/s0"), versions=(3, 4, 4))
        scored = dataclasses.replace(make_scored("0/0/s0"), group=group, summary=group.summary())
        await finished_of_resume(tmp_path / name, [scored])
        again = Bench(tmp_path / name, FakeLearner(), KnownPrompts([scored]))
        await again.recovery.recover(version)
        return again.counts

    assert await recover(3, "a") == {"steps": 0, "groups": 0, "newer": 1}
    assert await recover(4, "b") == {"steps": 0, "groups": 1}
    assert await recover(5, "c") == {"steps": 0, "groups": 1}, "only its first token is too old"
    assert await recover(6, "d") == {"steps": 0, "groups": 0, "over_age": 1}


async def killed_after_a_step(folder: Path) -> list[ScoredGroup]:
    groups = [make_scored("0/0/s0"), make_scored("0/1/s1")]
    run = Bench(folder, FakeLearner(), KnownPrompts())
    await run.recovery.begin()
    await run.train(groups)
    await run.replay.close()
    return groups


async def test_a_step_whose_data_changed_is_refused_with_the_next_action(tmp_path: Path) -> None:
    groups = await killed_after_a_step(tmp_path)
    again = Bench(tmp_path, FakeLearner(), KnownPrompts(groups, broken=["0/1/s1"]))
    message = r"step 1 of the journal cannot be repeated: 0/1/s1 is corrupt; fix that, or remove .*journal"
    with pytest.raises(JournalError, match=message) as caught:
        await again.recovery.recover(0)
    assert isinstance(caught.value.__cause__, SkippedSample)


async def test_a_step_that_the_checkpoint_has_settled_is_refused(tmp_path: Path) -> None:
    groups = await killed_after_a_step(tmp_path)
    again = Bench(tmp_path, FakeLearner(), KnownPrompts(groups), closed=["0/1/s1"])
    with pytest.raises(JournalError, match=r"0/1/s1 was trained or rejected before"):
        await again.recovery.recover(0)


async def test_a_step_that_is_taken_again_is_measured_and_the_next_one_follows_it(tmp_path: Path) -> None:
    groups = await killed_after_a_step(tmp_path)
    again = Bench(tmp_path, FakeLearner(), KnownPrompts(groups))
    assert await again.recovery.recover(0) == 1
    assert again.metrics.steps[1].phases == ["update"]
    await again.train([make_scored("0/2/s2")])
    assert [step.version for step in again.journal.recover(0).steps] == [1, 2]


async def test_the_next_run_in_the_same_place_recovers_nothing_of_it(tmp_path: Path) -> None:
    await killed_after_a_step(tmp_path)
    new = Bench(tmp_path, FakeLearner(), KnownPrompts())
    await new.recovery.begin()
    assert new.journal.recover(0).reached == 0
    await new.replay.close()


async def test_a_run_without_a_journal_removes_one_that_would_tell_of_another_past(tmp_path: Path) -> None:
    await killed_after_a_step(tmp_path)
    assert await NoRecovery(tmp_path / "journal").recover(7) == 7
    assert not (tmp_path / "journal").exists()
    await NoRecovery(tmp_path / "journal").begin()


class Slow:
    """Two calls that end only when both have begun."""

    def __init__(self) -> None:
        self.both = asyncio.Barrier(2)

    async def update(self, groups: Sequence[ScoredGroup]) -> UpdateReport:
        await self.both.wait()
        return UpdateReport(1, {})

    async def commit(self, version: int, groups: Sequence[ScoredGroup], seconds: Mapping[str, float]) -> None:
        await self.both.wait()


async def test_a_step_is_written_down_while_it_is_trained() -> None:
    slow = Slow()
    report = await asyncio.wait_for(StepLearner(slow, journal=slow).update([]), 30)
    assert report.version == 1


async def test_a_step_that_cannot_be_written_down_ends_the_run() -> None:
    class FullDisk(Slow):
        async def commit(self, version: int, groups: Sequence[ScoredGroup], seconds: Mapping[str, float]) -> None:
            raise JournalError("no space left")

    with pytest.raises(JournalError, match="no space left"):
        await asyncio.wait_for(StepLearner(Slow(), journal=FullDisk()).update([]), 30)


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


class Bench_of_lost_groups:
    """A buffer with a journal, in which the groups of a step are leased."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("mobula.cluster.recovery.step_learner.fetch_or_miss", fetch_or_lose)
        monkeypatch.setattr("mobula.cluster.replay.journal_writer.fetch_or_miss", fetch_or_lose)
        monkeypatch.setattr("mobula.cluster.replay.journal_writer.fetch_at_hand", fetch_what_is_there)
        self.journal = Journal(folder, {})
        self.replay = ReplayBuffer(journal=JournalWriter(self.journal, timeout_s=5, start_thread=AtOnce))
        self.sampled_again: list[str] = []
        self.counted: list[str] = []
        live = LiveGroups(FakePrompts(), put=lambda value: value)
        self.regenerator = GroupRegenerator(
            self.replay, live, self._sample_again, timeout_s=5, on_lost=self.counted.append
        )

    async def leased(self, *groups: ScoredGroup) -> list[ScoredGroup]:
        await self.replay.put(groups)
        return await self.replay.take(len(groups))

    async def _sample_again(self, prompt_id: str) -> ScoredGroup:
        self.sampled_again.append(prompt_id)
        group = make_group(make_prompt(prompt_id), versions=(3, 3, 3, 3))
        return ScoredGroup(group.summary(), group, (Reward(2.0), Reward(3.0)))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench_of_lost_groups:
    return Bench_of_lost_groups(tmp_path, monkeypatch)


async def test_what_the_journal_has_comes_from_there_and_the_rest_is_sampled_again(bench: Bench_of_lost_groups) -> None:
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
    num_bytes += regenerated[2].summary.num_bytes - gone.summary.num_bytes
    assert (await bench.replay.stats()).num_bytes == num_bytes
    await bench.replay.commit(4, regenerated)  # what was sampled again is on disk as well
    assert [group.group_id for group in bench.journal.recover(3).steps[0].groups] == list(IDS)
    await bench.replay.release(regenerated)
    assert (await bench.replay.stats()).num_bytes == 0


async def test_log_probs_that_are_lost_alone_are_dropped_from_their_group(bench: Bench_of_lost_groups) -> None:
    group = replace(make_scored(IDS[0]), reference_logprobs=LOST)
    [regenerated] = await bench.regenerator.regenerate(await bench.leased(group))
    assert regenerated == replace(group, reference_logprobs=None) and bench.sampled_again == []


async def test_a_trained_step_comes_whole_from_the_journal_or_not_at_all(bench: Bench_of_lost_groups) -> None:
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


async def test_a_step_is_regenerated_before_its_score_and_before_its_update(bench: Bench_of_lost_groups) -> None:
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


async def test_without_a_reference_nothing_is_scored(bench: Bench_of_lost_groups) -> None:
    roles = Picky()
    step = await bench.leased(lost(make_scored(IDS[0])), make_scored(IDS[1]))
    reference = RegeneratingReference(roles, bench.regenerator)
    await StepLearner(roles, regenerate=reference.regenerate).update(step)
    assert roles.scored == [] and len(roles.learned) == 1


@pytest.mark.parametrize("losses", [MAX_NODES_LOST, MAX_NODES_LOST + 1])
async def test_a_step_that_is_lost_again_and_again_ends_the_run(bench: Bench_of_lost_groups, losses: int) -> None:
    step = await bench.leased(make_scored(IDS[0]))
    roles = Picky(losses)
    learner = StepLearner(roles, regenerate=RegeneratingReference(roles, bench.regenerator).regenerate)
    if losses > MAX_NODES_LOST:
        with pytest.raises(LostObjectError):
            await learner.update(step)
    else:
        assert (await learner.update(step)).version == 1


async def test_a_group_that_the_learner_had_and_the_journal_missed_is_written_down_or_ends_the_run(
    bench: Bench_of_lost_groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another group in its place would not be the one that was trained."""
    step = await bench.leased(lost(make_scored(IDS[0])))

    class Learner:
        async def update(self, groups: Sequence[ScoredGroup]) -> UpdateReport:
            return UpdateReport(1, {})

    with pytest.raises(JournalError, match="resume=auto"):
        await StepLearner(Learner(), journal=bench.replay).update(step)
    there = {LOST: make_scored(IDS[0]).group}
    place = "mobula.cluster.replay.journal_writer.fetch_or_miss"
    monkeypatch.setattr(place, lambda found, **rest: [there.get(one, one) for one in found])
    assert (await StepLearner(Learner(), journal=bench.replay).update(step)).version == 1
    assert bench.journal.recover(0).reached == 1

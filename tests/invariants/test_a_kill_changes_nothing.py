"""With a journal a run may be killed at any moment, as often as one likes, and trains what it would have trained."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import FakePrompts
from hypothesis import given, settings
from hypothesis import strategies as st
from metrics_data import FakeClock, make_metrics
from runs import Run, audited, audited_run

from mobula.cluster.metrics.definitions import CounterName
from mobula.cluster.records.trajectory import GroupOutcome, Prompt
from mobula.cluster.recovery.checkpoints import latest_complete
from mobula.cluster.replay.journal import read_segment, segment_numbers, segment_path
from mobula.cluster.rollout.dispatcher import GroupObserver
from mobula.cluster.rollout.group_observers import EpisodeStages, OpeningRule, RejectionCounts, StageCurriculum

STEPS = 5


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Everything runs on the event loop, so a number of its turns is a moment; and a kill needs no sync to disk."""

    async def at_once(function: Callable[..., Any], /, *args: Any) -> Any:
        await asyncio.sleep(0)
        result = function(*args)
        await asyncio.sleep(0)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "to_thread", at_once)
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


class Setting:
    """A run whose timing and rewards are functions of a seed, on whatever folder."""

    def __init__(self, seed: int, size: int, max_staleness: int, interval: int, max_bytes: float) -> None:
        self.seed, self.size, self.max_staleness = seed, size, max_staleness
        self.interval, self.max_bytes = interval, max_bytes

    def run(self, folder: Path, **options: Any) -> Run:
        return Run(
            folder, **options, total_steps=STEPS, prompts_per_step=self.size, max_staleness=self.max_staleness,
            max_concurrent=8, drop_uniform=True,
            pauses=lambda prompt_id: self._choose(prompt_id).choice([0, 0, 1, 2, 8, 30]),
            values=lambda prompt_id: (1.0, 1.0) if self.is_uniform(prompt_id) else (0.0, 1.0),
            checkpoint_interval=self.interval, has_journal=True, max_bytes=self.max_bytes,
        )  # fmt: skip

    def is_uniform(self, prompt_id: str) -> bool:
        return self._choose(prompt_id).random() < 0.3

    def expected(self) -> list[str]:
        """The first prompts of the sequence that are worth a step, as many as all steps take."""
        prompts = FakePrompts(epoch_size=50)
        ids = [prompts.id_at(index) for index in range(1000)]
        return sorted([i for i in ids if not self.is_uniform(i)][: STEPS * self.size])

    def _choose(self, prompt_id: str) -> random.Random:
        return random.Random(f"{self.seed}/{prompt_id}")


THREE_KILLS = st.lists(st.integers(1, 400), min_size=1, max_size=3)  # at most
SETTINGS = st.builds(
    Setting,
    seed=st.integers(0, 2**32),
    size=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    interval=st.integers(0, 3),
    max_bytes=st.sampled_from([float("inf"), 200, 1]),
)


async def killed(run: Run, num_turns: int, folder: Path, left: Path) -> None:
    """Let the run go on for so many turns of the loop; `left` is what a kill leaves of `folder` at that moment."""
    going = asyncio.ensure_future(run.go())
    for _ in range(num_turns):
        await asyncio.sleep(0)
        if going.done():
            going.result()
            break
    folder.mkdir(exist_ok=True)
    shutil.copytree(folder, left)
    going.cancel()
    await asyncio.wait([going])


def goes_on_from(before: Run, after: Run) -> None:
    """Nothing that could be seen of `before` is otherwise in `after`, and nothing finished is sampled again."""
    published = before.weights.published[-1] if before.weights.published else 0
    if after.weights.published:
        assert after.weights.published[0] >= published
        assert after.learner.weights[:published] == before.learner.weights[:published]
    assert after.recovered.keys() <= {"steps", "groups"}, "nothing is lost"


def within_bound(run: Run, max_staleness: int) -> bool:
    return all(
        version - max_staleness <= group.summary.oldest_version <= version
        for version, groups in run.learner.trained
        for group in groups
    )


@settings(max_examples=60)
@given(setting=SETTINGS, kills=st.lists(st.integers(1, 400), min_size=1, max_size=4))
def test_killed_at_any_moment_it_loses_no_prompt_and_trains_none_twice(
    tmp_path_factory: pytest.TempPathFactory, setting: Setting, kills: list[int]
) -> None:
    base = tmp_path_factory.mktemp("killed")
    parts: list[Run] = []
    for number, num_turns in enumerate(kills):
        parts.append(setting.run(base / str(number)))
        asyncio.run(killed(parts[-1], num_turns, base / str(number), base / str(number + 1)))
    last = setting.run(base / str(len(kills)))
    parts.append(last)
    assert asyncio.run(last.go()) == STEPS
    trained = [prompt_id for step in last.learner.weights for prompt_id in step]
    assert sorted(trained) == setting.expected()
    for before, after in zip(parts, parts[1:], strict=False):
        goes_on_from(before, after)
    assert all(within_bound(part, setting.max_staleness) for part in parts)
    if setting.max_staleness == 0:
        whole = setting.run(base / "whole")
        asyncio.run(whole.go())
        assert last.learner.weights == whole.learner.weights, "the same steps in the same order"


@settings(max_examples=30)
@given(setting=SETTINGS, num_turns=st.integers(1, 400))
def test_what_was_finished_is_not_sampled_again(
    tmp_path_factory: pytest.TempPathFactory, setting: Setting, num_turns: int
) -> None:
    base = tmp_path_factory.mktemp("finished")
    first = setting.run(base / "0")
    asyncio.run(killed(first, num_turns, base / "0", base / "1"))
    checkpoint = latest_complete(base / "1" / "checkpoints")
    second = setting.run(base / "1")
    if checkpoint is None:
        return
    found = second.journal.recover(int(checkpoint.name.removeprefix("step-")))
    kept = {g.group_id for g in found.finished} | {i for step in found.steps for i in step.group_ids}
    asyncio.run(second.go())
    assert not kept & second.rollouts.attempts.keys()
    assert second.recovered == {"steps": len(found.steps), "groups": len(found.finished)}


@settings(max_examples=40)
@given(setting=SETTINGS, num_turns=st.integers(30, 400), cut=st.floats(0, 1))
def test_a_journal_that_lost_its_end_is_gone_on_with_from_what_is_left(
    tmp_path_factory: pytest.TempPathFactory, setting: Setting, num_turns: int, cut: float
) -> None:
    """As after a lost disk cache: later segments are gone, and the last one ends anywhere."""
    base = tmp_path_factory.mktemp("cut")
    asyncio.run(killed(setting.run(base / "0"), num_turns, base / "0", base / "1"))
    journal = base / "1" / "journal"
    numbers = segment_numbers(journal)
    if numbers:
        place = cut * len(numbers)
        kept = min(int(place), len(numbers) - 1)
        for number in numbers[kept + 1 :]:
            segment_path(journal, number).unlink()
        last = segment_path(journal, numbers[kept])
        os.truncate(last, int((place - kept) * last.stat().st_size))
        read_segment(journal, numbers[kept])
    run = setting.run(base / "1")
    assert asyncio.run(run.go()) == STEPS
    assert sorted(prompt_id for step in run.learner.weights for prompt_id in step) == setting.expected()
    assert within_bound(run, setting.max_staleness)


NUM_STAGES = 3


class StagedPrompts(FakePrompts):
    """Prompts of the stages 0, 1, 2, 0, ...; those of closed stages are passed over."""

    def __init__(self, curriculum: StageCurriculum) -> None:
        super().__init__(epoch_size=50)
        self._curriculum = curriculum

    def is_open(self, index: int) -> bool:
        return self._curriculum.is_open(index % NUM_STAGES)

    def next(self) -> Prompt:
        prompt = super().next()
        while not self.is_open(self.index_of(prompt.prompt_id)):
            prompt = super().next()
        return prompt


class Shown(GroupObserver):
    """Every group that it was shown, also across resumes."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    def finished(self, outcome: GroupOutcome) -> None:
        self.ids.append(outcome.group_id)

    def state(self) -> dict[str, Any]:
        return {"ids": list(self.ids)}

    def restore(self, version: int, state: dict[str, Any]) -> None:
        self.ids = list(state["ids"])


class Observed:
    """A part of a run with everything that learns from its groups as they arrive."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        self.curriculum = StageCurriculum(NUM_STAGES, OpeningRule(num_episodes=4, success_rate=0.5))
        self.shown = Shown()
        self.metrics = make_metrics([], FakeClock())
        rejections = RejectionCounts(self.metrics)
        prompts = StagedPrompts(self.curriculum)
        stages = EpisodeStages(
            self.curriculum,
            place_of=lambda prompt_id: (prompts.index_of(prompt_id), prompts.index_of(prompt_id) % NUM_STAGES),
            is_success=lambda reward: reward.value > 0,
        )
        self.run = setting.run(
            folder,
            observers=[self.shown, rejections, stages],
            parts={"shown": self.shown, "rejections": rejections, "curriculum": stages},
            prompts=prompts,
            prefetches=False,
        )

    @property
    def learned(self) -> tuple[Any, ...]:
        counts = [self.metrics.counts(name) for name in (CounterName.REJECTED, CounterName.REJECTED_TOKENS)]
        return self.run.learner.weights, self.curriculum.state(), counts, sorted(self.shown.ids)


@settings(max_examples=60)
@given(setting=SETTINGS, kills=THREE_KILLS)
def test_what_learns_from_groups_as_they_arrive_knows_the_same_after_kills(
    tmp_path_factory: pytest.TempPathFactory, setting: Setting, kills: list[int]
) -> None:
    base = tmp_path_factory.mktemp("observed")
    for number, num_turns in enumerate(kills):
        part = Observed(setting, base / str(number)).run
        asyncio.run(killed(part, num_turns, base / str(number), base / str(number + 1)))
    last = Observed(setting, base / str(len(kills)))
    assert asyncio.run(last.run.go()) == STEPS
    assert len(set(last.shown.ids)) == len(last.shown.ids), "each group is shown once"
    trained = {prompt_id for step in last.run.learner.weights for prompt_id in step}
    rejected = set(last.shown.ids) - trained - set(last.run.dispatcher.pending())
    assert all(map(setting.is_uniform, rejected))
    assert last.metrics.counts(CounterName.REJECTED).get("uniform", 0) == len(rejected), "each is counted once"
    if setting.max_staleness == 0:
        whole = Observed(setting, base / "whole")
        asyncio.run(whole.run.go())
        assert last.learned == whole.learned


AUDITED_STEPS = 4


@settings(max_examples=40)
@given(kills=THREE_KILLS, max_staleness=st.integers(0, 2), interval=st.integers(0, 2), torn=st.integers(0, 30))
def test_the_audit_of_a_killed_run_passes_and_counts_its_parts(
    tmp_path_factory: pytest.TempPathFactory, kills: list[int], max_staleness: int, interval: int, torn: int
) -> None:
    base = tmp_path_factory.mktemp("kills")
    shape = {"total_steps": AUDITED_STEPS, "max_staleness": max_staleness, "checkpoint_interval": interval}
    for number, num_turns in enumerate(kills):
        folder, left = base / str(number), base / str(number + 1)
        run, _ = audited_run(folder, **shape)
        asyncio.run(killed(run, num_turns, folder, left))
        with (left / "audit.jsonl").open("ab") as chain:
            chain.write(b'{"seq":1,"previous":"00000000000000'[:torn])
        assert audited(left).findings == []
        assert audited(left).has_torn_end == (torn > 0)
    folder = base / str(len(kills))
    run, audit = audited_run(folder, **shape)
    assert asyncio.run(run.go()) == AUDITED_STEPS
    audit.ended("done", AUDITED_STEPS)
    result = audited(folder)
    assert result.findings == []
    assert [part.status for part in result.history.parts] == [*[None] * len(kills), "done"]
    steps = [sorted(step.groups) for step in result.history.steps.values()]
    assert steps == [sorted(ids) for ids in run.learner.weights]

"""Rows in the place of rollouts: each step takes the next ones, resumed or not, and held-out rows are scored once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from mobula.cluster.errors import DatasetError
from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.trajectory import (
    FinishReason,
    Prompt,
    Response,
    Reward,
    ScoredGroup,
    Trajectory,
    TrajectoryGroup,
    WeightSpan,
)
from mobula.cluster.rollout import row_stream
from mobula.cluster.rollout.evaluation import EvaluationSchedule, RowEvaluator
from mobula.cluster.rollout.row_stream import RowStream, stored
from mobula.cluster.weight_sync.interfaces import NoReceivers


def row(name: str) -> ScoredGroup:
    ids = np.arange(3, dtype=np.int32)
    prompt = Prompt(name, name, name, ids, ids)
    one = Trajectory(
        f"{name}#0",
        TokenActions(ids),
        np.zeros(3, np.float32),
        np.ones(3, bool),
        (WeightSpan(0, 0, 3),),
        FinishReason.STOP,
        Response(name, 3, False),
    )
    group = TrajectoryGroup(prompt, (one,))
    return ScoredGroup(group.summary(), group, (Reward(1.0),))


class Source:
    """Rows that are called by their place."""

    def __init__(self, end: int = 1000) -> None:
        self.cursor = 0
        self._end = end

    def next(self) -> ScoredGroup:
        if self.cursor == self._end:
            raise DatasetError("no row is usable")
        self.cursor += 1
        return row(str(self.cursor - 1))

    def restore(self, cursor: int, pending: Sequence[str]) -> None:
        assert not pending
        self.cursor = cursor


def names(groups: Sequence[ScoredGroup]) -> list[str]:
    return [group.summary.group_id for group in groups]


class Counting:
    """A learner and a reference that count their calls."""

    def __init__(self) -> None:
        self.num_scored = 0
        self.assessed: list[list[str]] = []

    async def score(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        self.num_scored += len(groups)
        return [replace(group, reference_logprobs=[np.zeros(3)]) for group in groups]

    async def assess(self, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        assert all(group.reference_logprobs is not None for group in groups)
        self.assessed.append(names(groups))
        return {"loss": 1.0, "accuracy": 0.5}


async def test_steps_take_rows_in_order_as_of_the_version_that_trains_them() -> None:
    stream = RowStream(Source(), lambda group: group, Counting(), total_steps=3)
    async with stream.streaming():
        for version in range(3):
            groups = await stream.take(2)
            assert names(groups) == [str(2 * version), str(2 * version + 1)]
            assert [group.summary.tokens_by_version for group in groups] == [{version: 3}] * 2
            await stream.release(groups)


async def test_the_rows_of_the_next_step_are_scored_while_the_learner_trains() -> None:
    reference = Counting()
    stream = RowStream(Source(), lambda group: group, reference, total_steps=2)
    async with stream.streaming():
        groups = await stream.take(2)
        assert all(group.reference_logprobs is not None for group in groups)
        async with asyncio.timeout(5):
            while reference.num_scored < 4:
                await asyncio.sleep(0)
        await stream.take(2)
    assert reference.num_scored == 4, "there is no third step"


async def test_a_resumed_run_takes_the_rows_that_it_would_have_taken() -> None:
    """The step that was read ahead is not counted as taken."""
    first = RowStream(Source(), lambda group: group, Counting(), total_steps=5)
    async with first.streaming():
        await first.take(3)
        await first.take(3)
        state = first.state()
    second = RowStream(Source(), lambda group: group, Counting(), total_steps=5)
    second.restore(2, state)
    groups = await second.take(3)
    assert names(groups) == ["6", "7", "8"]
    assert groups[0].summary.tokens_by_version == {2: 3}


async def test_what_cannot_be_read_fails_the_step_that_takes_it() -> None:
    stream = RowStream(Source(end=3), lambda group: group, Counting(), total_steps=5)
    async with stream.streaming():
        assert names(await stream.take(2)) == ["0", "1"]
        with pytest.raises(DatasetError):
            await stream.take(2)


def test_a_stored_row_keeps_its_label_and_refers_to_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    small = stored(row("a"), 7, lambda group: ("stored", group))
    assert small.group.trajectories[0].weight_spans == (WeightSpan(7, 0, 3),), "a small row is a value"
    monkeypatch.setattr(row_stream, "SMALL_BYTES", 0)
    found = stored(row("a"), 7, lambda group: ("stored", group))
    assert found.rewards == small.rewards == (Reward(1.0),)
    assert found.group[0] == "stored"
    assert found.group[1].trajectories[0].weight_spans == (WeightSpan(7, 0, 3),)


async def test_held_out_rows_are_assessed_when_due_and_scored_once() -> None:
    role, seen = Counting(), []
    schedule = EvaluationSchedule(interval_steps=2, total_steps=5)
    evaluator = RowEvaluator(
        rows=[row("a"), row("b")],
        learner=role,
        reference=role,
        schedule=schedule,
        on_result=lambda version, metrics: seen.append(version),
    )
    async with evaluator.evaluating():
        for version in range(6):
            await evaluator.maybe_run(version)
            await evaluator.finish()
    assert seen == [0, 2, 4, 5]
    assert role.assessed == [["a", "b"]] * 4
    assert role.num_scored == 2
    again = RowEvaluator(rows=[], learner=role, reference=role, schedule=schedule, on_result=lambda v, m: None)
    again.restore(4, evaluator.state())
    await again.maybe_run(4)
    assert len(role.assessed) == 4, "a result that the checkpoint holds is not measured again"


async def test_a_run_without_engines_publishes_nothing() -> None:
    weights = NoReceivers()
    async with weights.settling():
        assert await weights.publish(3) == 3
        await weights.settled()

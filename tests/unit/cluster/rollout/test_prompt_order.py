"""Which prompts are asked next: prefetch and curriculum."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from fakes import FakePrompts, make_prompt
from waiting import until

from mobula.actors.datasets.prompts import InDriver, PromptSource
from mobula.actors.datasets.rows import Row
from mobula.cluster.errors import DatasetError
from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.rollout.group_observers import OpeningRule, StageCurriculum
from mobula.cluster.rollout.in_flight import PromptPrefetcher
from mobula.cluster.workers.supervisor import background_tasks
from mobula.configs.load import load_config


async def test_prompts_come_in_order_each_with_its_own_cursor() -> None:
    source = FakePrompts()
    source.restore(7, ["0/2/s2"])
    prefetcher = PromptPrefetcher(source, 3)
    async with background_tasks() as tasks:
        tasks.create_task(prefetcher.prepare())
        found = [await prefetcher.next() for _ in range(4)]
    assert [(prompt.prompt_id, cursor) for prompt, cursor in found] == [
        ("0/2/s2", 7), ("0/7/s7", 8), ("0/8/s8", 9), ("0/9/s9", 10),
    ]  # fmt: skip


async def test_no_more_are_prepared_than_allowed() -> None:
    source = FakePrompts()
    prefetcher = PromptPrefetcher(source, 2)
    async with background_tasks() as tasks:
        tasks.create_task(prefetcher.prepare())
        await prefetcher.next()
        await until(lambda: source.cursor == 1 + 2 + 1)
        await asyncio.sleep(0.05)  # for what must not happen
        assert source.cursor == 1 + 2 + 1, "one taken, two ready, and one in the hands of who prepares"


async def test_data_without_a_usable_row_ends_the_wait_for_a_prompt() -> None:
    class Unusable(FakePrompts):
        def next(self) -> Prompt:
            raise DatasetError("no row is usable")

    prefetcher = PromptPrefetcher(Unusable(), 2)
    with pytest.raises(DatasetError, match="no row is usable"):
        async with background_tasks() as tasks:
            tasks.create_task(prefetcher.prepare())
            await prefetcher.next()


NUM_STAGES = 3


def curriculum(num_episodes: int, success_rate: float, opened: list[int] | None = None) -> StageCurriculum:
    rule = OpeningRule(num_episodes, success_rate)
    return StageCurriculum(NUM_STAGES, rule, on_opened=(opened if opened is not None else []).append)


def test_a_number_of_episodes_of_the_newest_stage_opens_the_next_one() -> None:
    opened: list[int] = []
    found = curriculum(4, 0.0, opened)
    found.observe(0, [False, False])
    assert [found.is_open(stage) for stage in range(NUM_STAGES)] == [True, False, False]
    found.observe(0, [False, True])
    found.observe(0, [True] * 100)  # of an earlier stage
    assert found.newest == 1
    found.observe(1, [False] * 4)
    found.observe(2, [True] * 100)
    assert (found.newest, opened) == (2, [1, 2])


def test_success_counts_over_the_last_episodes_of_the_newest_stage() -> None:
    found = curriculum(4, 0.75)
    found.observe(0, [True, True, True])
    assert found.newest == 0, "too few episodes"
    found = curriculum(4, 0.75)
    found.observe(0, [False, False, True, True, True])  # three of the last four
    assert found.newest == 1
    found.observe(1, [True, False, False, True])
    assert found.newest == 1


def test_a_resumed_curriculum_goes_on_where_it_was() -> None:
    first, opened = curriculum(4, 0.75), []
    first.observe(0, [True] * 4)
    first.observe(1, [True, True, False])
    second = curriculum(4, 0.75, opened)
    second.restore(7, json.loads(json.dumps(first.state())))
    assert (second.newest, opened) == (1, [1])
    second.observe(1, [True])
    assert second.newest == 2


class Maker:
    def prepare(self, row: Row, prompt_id: str) -> Prompt:
        return replace(make_prompt(prompt_id), metadata=row.metadata)


def test_rows_of_closed_stages_are_passed_over_and_asked_in_a_later_epoch() -> None:
    rows = tuple(Row(f"r{n}", "?", "", "", metadata={"stage": n % 3}) for n in range(9))
    found = curriculum(1, 0.0)
    source = PromptSource(
        rows, InDriver(Maker()), seed=1, split_name="train", is_open=lambda row: found.is_open(row.metadata["stage"])
    )
    first = [source.next() for _ in range(3)]
    assert {prompt.metadata["stage"] for prompt in first} == {0}
    found.observe(0, [True])
    found.observe(1, [True])
    cursor = source.cursor
    later = [source.next() for _ in range(18)]
    assert {prompt.metadata["stage"] for prompt in later} == {0, 1, 2}
    again = PromptSource(rows, InDriver(Maker()), seed=1, split_name="train")
    again.restore(cursor, ())
    assert [again.next().prompt_id for _ in range(18)] == [prompt.prompt_id for prompt in later]


@pytest.mark.parametrize("words", [["kind=success"], ["kind=none", "stages=[{size: 2}, {size: 3}]"]])
def test_stages_and_what_opens_them_go_together(words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"environment\.curriculum"):
        load_config(["experiment=pixel_maze", *(f"environment.curriculum.{word}" for word in words)])

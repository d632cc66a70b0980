"""Prompts that are prepared before they are asked for: the same ones, in the same order, and no more than allowed."""

import asyncio

import pytest
from fakes import FakePrompts
from waiting import until

from mobula.cluster.errors import DatasetError
from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.rollout.prefetch import PromptPrefetcher
from mobula.cluster.workers.supervisor import background_tasks


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

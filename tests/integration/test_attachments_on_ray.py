"""A stream whose values announce others: on a real cluster, also where its actor ends before it kept its word."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import ray
from small_cluster import start

from mobula.cluster.errors import RolloutError, WorkerDiedError
from mobula.cluster.runtime.object_store import fetch
from mobula.cluster.runtime.ray_actors import kill, with_attachments

BYTES = 4 << 20  # of a value that lives in the object store
FEW, MANY = 1, BYTES // 8


class Announcer:
    """Each value holds how many follow; `size` is how many numbers those have."""

    async def announce(self, numbers: list[int], size: int, pause_s: float) -> AsyncIterator[Any]:
        for place, number in enumerate(numbers):
            yield (place, number)
            for index in range(number):
                await asyncio.sleep(pause_s)  # so that the next value is not there when it is asked for
                yield np.full(size, 10 * place + index)

    async def breaks_its_word(self, how: str) -> AsyncIterator[Any]:
        yield (0, 1)
        yield np.full(FEW, 0)
        yield (1, 3)
        yield np.full(FEW, 10)
        if how == "dies":
            await asyncio.sleep(0.5)  # what was sent is on its way
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raises":
            raise RolloutError("no more of it")


def announced(value: tuple[int, int]) -> int:
    return value[1]


async def received(stream: Any) -> AsyncIterator[tuple[int, list[Any]]]:
    async for (place, _), references in with_attachments(stream, announced, what="what it announces"):
        yield place, references


@pytest.fixture(scope="module")
def announcer(local_ray: str) -> Any:
    handle = start(Announcer, "announcer", max_concurrency=4, options={})
    yield handle
    kill(handle)


@pytest.mark.parametrize(("size", "pause_s"), [(FEW, 0.0), (FEW, 0.02), (MANY, 0.0), (MANY, 0.02)])
async def test_each_value_comes_with_references_to_those_that_belong_to_it(
    announcer: Any, size: int, pause_s: float
) -> None:
    numbers = [0, 3, 1, 0, 2]
    stream = announcer.announce.options(num_returns="streaming").remote(numbers, size, pause_s)
    found = [(place, references) async for place, references in received(stream)]
    assert [place for place, _ in found] == list(range(len(numbers)))
    for place, references in found:
        values = await asyncio.to_thread(fetch, references, timeout_s=20, what="what belongs to a value")
        assert [value[0] for value in values] == [10 * place + index for index in range(numbers[place])]
        assert all(value.shape == (size,) for value in values)


@pytest.mark.parametrize(
    ("how", "error"), [("raises", RolloutError), ("returns", RuntimeError), ("dies", WorkerDiedError)]
)
async def test_an_actor_that_ends_before_all_has_come_is_an_error(
    announcer: Any, how: str, error: type[Exception]
) -> None:
    stream = announcer.breaks_its_word.options(num_returns="streaming").remote(how)
    found = []
    with pytest.raises(error):
        async with asyncio.timeout(60):
            async for place, references in received(stream):
                found.append((place, references))
    [(place, [reference])] = found
    assert (place, (await asyncio.to_thread(ray.get, reference, timeout=20))[0]) == (0, 0)

"""A wait for an idle engine ends with the last of its requests, or at its deadline."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.simulation.virtual_time import run_virtually
from mobula.actors.samplers.serving import RunningRequests


async def end_of_a_wait(ends_s: tuple[float, ...], timeout_s: float) -> float:
    """When a wait of at most `timeout_s` ends that begins at 0, with requests that end at `ends_s`."""
    in_flight = RunningRequests()

    async def request(end_s: float) -> None:
        with in_flight.one_more():
            await asyncio.sleep(end_s)

    requests = [asyncio.create_task(request(end_s)) for end_s in ends_s]
    await asyncio.sleep(0)
    await in_flight.drained(timeout_s)
    ended_s = asyncio.get_running_loop().time()
    await asyncio.gather(*requests)
    return ended_s


@pytest.mark.parametrize(
    ("ends_s", "ended_s"), [((), 0.0), ((0.01,), 0.01), ((0.03, 0.01), 0.03), ((0.01, 9.0), 0.05)], ids=str
)
def test_a_wait_ends_with_the_last_request_or_in_its_time(ends_s: tuple[float, ...], ended_s: float) -> None:
    assert run_virtually(end_of_a_wait(ends_s, timeout_s=0.05)) == pytest.approx(ended_s)


async def test_a_request_that_fails_is_no_longer_there() -> None:
    in_flight = RunningRequests()
    with pytest.raises(ValueError, match="broken off"), in_flight.one_more():
        raise ValueError("broken off")
    await asyncio.wait_for(in_flight.drained(60), 1)

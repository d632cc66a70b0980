"""Virtual time: the clock jumps from timer to timer, and only then."""

import asyncio

import pytest

from benchmarks.simulation.virtual_time import run_virtually


def now() -> float:
    return asyncio.get_running_loop().time()


def test_days_of_sleep_pass_at_once_and_in_order() -> None:
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        woken.append((name, now()))

    async def main() -> None:
        await asyncio.gather(sleeper("late", 200_000.0), sleeper("early", 0.5), sleeper("later", 300_000.0))

    run_virtually(main())
    assert [name for name, _ in woken] == ["early", "late", "later"]
    assert [moment for _, moment in woken] == pytest.approx([0.5, 200_000.0, 300_000.0])


def test_a_deadline_ends_a_wait_at_its_moment() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7.0):
                await asyncio.Event().wait()
        return now()

    assert run_virtually(main()) == pytest.approx(7.0)


def test_what_goes_to_a_thread_is_done_before_time_moves() -> None:
    async def main() -> tuple[int, float]:
        ticking = asyncio.create_task(asyncio.sleep(5.0))
        result = await asyncio.to_thread(lambda: 3)
        moment = now()
        ticking.cancel()
        return result, moment

    assert run_virtually(main()) == (3, 0.0)


def test_an_error_in_a_thread_travels() -> None:
    async def main() -> None:
        await asyncio.to_thread(lambda: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        run_virtually(main())


def test_a_deadlock_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="nothing can happen any more"):
        run_virtually(main())

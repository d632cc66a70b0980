"""The phases of a start, from its first moment to the first response."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from metrics_data import FakeClock, write_run

from mobula.cluster.metrics.hub import StartUp
from mobula.cluster.metrics.report.run_folder import read_run_folder
from mobula.deploy.report.report import write_report


def test_phases_in_turns_and_side_by_side_are_measured_until_the_first_response() -> None:
    clock = FakeClock()
    start_up = StartUp(clock(), clock)
    clock.pass_s(3)
    start_up.ended("imports")

    async def loads(seconds: float, after: asyncio.Event, done: asyncio.Event) -> None:
        await after.wait()
        clock.pass_s(seconds)
        done.set()

    async def side_by_side() -> None:
        begun, learner, engines = asyncio.Event(), asyncio.Event(), asyncio.Event()
        begun.set()
        await asyncio.gather(
            start_up.timing("engines", loads(4, learner, engines)), start_up.timing("learner", loads(2, begun, learner))
        )

    asyncio.run(side_by_side())
    for response in range(2):
        clock.pass_s(1)
        start_up.ended("first push", 0.5)
        clock.pass_s(response + 1)
        start_up.responded()
    phases = {"imports": 3, "learner": 2, "engines": 6, "first push": 0.5, "first response": 1, "total": 11}
    assert start_up.seconds == phases
    assert list(start_up.seconds) == list(phases)


def test_a_phase_that_fails_has_no_seconds() -> None:
    clock = FakeClock()
    start_up = StartUp(clock(), clock)
    with pytest.raises(ValueError, match="model"), start_up.timed("learner"):
        raise ValueError("no model")
    assert start_up.seconds == {}


def test_the_report_lists_the_phases(tmp_path: Path) -> None:
    write_run(tmp_path / "digits", num_steps=2)
    assert 'id="start-up"' not in write_report(tmp_path / "digits").read_text(encoding="utf-8")
    summary = read_run_folder(tmp_path / "digits").summary
    assert summary is not None
    summary = replace(summary, start_up={"imports": 4.24, "total": 21.0})
    text = write_report(tmp_path / "digits", summary).read_text(encoding="utf-8")
    assert '<th scope="row">imports</th><td>4.2</td>' in text
    assert '<th scope="row">total</th><td>21.0</td>' in text

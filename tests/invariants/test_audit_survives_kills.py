"""A run that is killed at any moment and resumed leaves a chain that proves it whole."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import audited, audited_run

STEPS = 4


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Everything runs on the event loop, so a number of its turns is a moment."""

    async def at_once(function: Callable[..., Any], /, *args: Any) -> Any:
        await asyncio.sleep(0)
        return function(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "to_thread", at_once)
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


async def left_by_kill(go: Callable[[], Any], num_turns: int, folder: Path, left: Path) -> None:
    """Lets the run continue for so many turns of the loop; `left` is what a kill leaves of `folder` then."""
    going = asyncio.ensure_future(go())
    for _ in range(num_turns):
        await asyncio.sleep(0)
        if going.done():
            break
    shutil.copytree(folder, left)
    going.cancel()
    await asyncio.wait([going])


@settings(max_examples=40)
@given(
    kills=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    max_staleness=st.integers(0, 2),
    interval=st.integers(0, 2),
    torn=st.integers(0, 30),
)
def test_the_audit_of_a_killed_run_passes_and_counts_its_parts(
    tmp_path_factory: pytest.TempPathFactory, kills: list[int], max_staleness: int, interval: int, torn: int
) -> None:
    base = tmp_path_factory.mktemp("kills")
    shape: dict[str, Any] = {"total_steps": STEPS, "max_staleness": max_staleness, "checkpoint_interval": interval}
    for number, num_turns in enumerate(kills):
        folder, left = base / str(number), base / str(number + 1)
        run, _ = audited_run(folder, **shape)
        asyncio.run(left_by_kill(run.go, num_turns, folder, left))
        with (left / "audit.jsonl").open("ab") as chain:
            chain.write(b'{"seq":1,"previous":"00000000000000'[:torn])
        assert audited(left).findings == []
        assert audited(left).has_torn_end == (torn > 0)
    folder = base / str(len(kills))
    run, audit = audited_run(folder, **shape)
    assert asyncio.run(run.go()) == STEPS
    audit.ended("done", STEPS)
    result = audited(folder)
    assert result.findings == []
    assert [part.status for part in result.history.parts] == [*[None] * len(kills), "done"]
    assert [sorted(step.groups) for step in result.history.steps.values()] == [
        sorted(ids) for ids in run.learner.weights
    ]

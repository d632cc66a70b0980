"""torch's profiler around the updates that the configuration names, and around no others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mobula.cluster.tracing.profiler import UpdateProfiler


def update(profiler: UpdateProfiler, version: int) -> None:
    """An update that is one product of matrices."""
    with profiler.update(version):
        torch.ones(8, 8) @ torch.ones(8, 8)


def test_the_named_updates_leave_a_trace_of_their_operators(tmp_path: Path) -> None:
    profiler = UpdateProfiler([2, 3], tmp_path, 1, "cpu")
    for version in (1, 2, 3, 4):
        update(profiler, version)
    found = sorted(path.name for path in (tmp_path / "traces").iterdir())
    assert found == ["update-000002-rank-1.json", "update-000003-rank-1.json"]
    events = json.loads((tmp_path / "traces" / found[0]).read_text())["traceEvents"]
    assert "aten::mm" in {event["name"] for event in events}


def test_without_steps_nothing_is_written(tmp_path: Path) -> None:
    update(UpdateProfiler([], tmp_path, 0, "cpu"), 1)
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_cannot_be_written_costs_the_trace_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "traces").write_text("in the way")
    update(UpdateProfiler([1], tmp_path, 0, "cpu"), 1)
    assert "the profile of update 1 could not be written" in caplog.text

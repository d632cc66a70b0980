"""torch's profiler around the updates that the configuration names, and around no others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mobula.cluster.roles import UpdateReport
from mobula.cluster.tracing.profiler import UpdateProfiler, profiled
from mobula.learner.learner import Learner
from mobula.learner.offline.learner import OfflineLearner


class Rank:
    """A rank whose update is one product of matrices."""

    def __init__(self, profiler: UpdateProfiler) -> None:
        self.profiler = profiler

    @profiled
    def update(self, groups: int, version: int) -> UpdateReport:
        torch.ones(groups, groups) @ torch.ones(groups, groups)
        return UpdateReport(version, {})


def test_the_named_updates_leave_a_trace_of_their_operators(tmp_path: Path) -> None:
    rank = Rank(UpdateProfiler([2, 3], tmp_path, 1, "cpu"))
    assert [rank.update(8, version).version for version in (1, 2, 3, 4)] == [1, 2, 3, 4]
    found = sorted(path.name for path in (tmp_path / "traces").iterdir())
    assert found == ["update-000002-rank-1.json", "update-000003-rank-1.json"]
    events = json.loads((tmp_path / "traces" / found[0]).read_text())["traceEvents"]
    assert "aten::mm" in {event["name"] for event in events}


def test_without_steps_nothing_is_written(tmp_path: Path) -> None:
    Rank(UpdateProfiler([], tmp_path, 0, "cpu")).update(8, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_cannot_be_written_costs_the_trace_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "traces").write_text("in the way")
    assert Rank(UpdateProfiler([1], tmp_path, 0, "cpu")).update(8, 1).version == 1
    assert "the profile of update 1 could not be written" in caplog.text


def test_the_updates_of_both_kinds_of_learner_are_profiled() -> None:
    """`Learner.update` is `update_with` without more."""
    assert hasattr(Learner.update_with, "__wrapped__") and hasattr(OfflineLearner.update, "__wrapped__")

"""A process is bound to cores that it may use, whatever Ray counts."""

from __future__ import annotations

import os

import pytest

from mobula.cluster.runtime import ray_actors
from mobula.cluster.runtime.ray_actors import BOUND_THREADS


@pytest.mark.parametrize(
    ("positions", "claimed"), [((0,), [4]), ((0, 1), [4, 6]), ((1,), [6]), ((2, 3), [4, 6]), ((3,), [6]), ((0, 2), [4])]
)
def test_positions_are_those_of_usable_cores(
    positions: tuple[int, ...], claimed: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A container or a raylet with `--num-cpus` above its cores: the plan may name a position that does not exist."""
    bound: list[list[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {6, 4})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: bound.append(cores))
    monkeypatch.setenv(BOUND_THREADS, ",".join(map(str, positions)))
    ray_actors._claim(positions)
    assert bound == [claimed]
    assert os.environ[BOUND_THREADS] == ",".join(map(str, claimed))
    assert ("Ray counts more CPUs" in caplog.text) == (max(positions) > 1)


def test_without_an_engine_no_variable_appears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    monkeypatch.delenv(BOUND_THREADS, raising=False)
    ray_actors._claim((0,))
    assert BOUND_THREADS not in os.environ

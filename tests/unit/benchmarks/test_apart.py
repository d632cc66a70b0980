"""Workers of benchmarks in processes of their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.harness.apart import apart

pytestmark = pytest.mark.timeout(120)


def meet(own: Path, other: Path) -> Callable[[int], int]:
    """Builds a worker once the other process builds one too, as members of a process group do."""
    own.touch()
    while not other.exists():
        time.sleep(0.01)
    return abs


def test_workers_that_wait_for_each_other_are_built(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    with apart(meet, one, two, env={}) as first, apart(meet, two, one, env={}) as second:
        assert (first.ask(-3), second.ask(-4), first.ask(5)) == (3, 4, 5)

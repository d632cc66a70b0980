"""Planted faults are found by `mobula diagnose`, and healthy runs have no fault (half an hour on two cores).

MOBULA_PLANTED_RUNS names a folder that keeps the runs: those that it holds are not made again.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from planted_faults import FAULTS, HEALTHY, Outcome, outcome

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(4 * 3600)]
LEAST = 0.9  # of the planted faults


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = os.environ.get("MOBULA_PLANTED_RUNS")
    return Path(kept).resolve() if kept else tmp_path_factory.mktemp("planted")


def test_nine_of_ten_planted_faults_are_found_by_a_check_that_names_them(folder: Path) -> None:
    outcomes = [outcome(run, folder) for run in FAULTS]
    missed = [each.run.name for each in outcomes if not each.found]
    assert len(outcomes) >= 20 and len(missed) <= (1 - LEAST) * len(outcomes), missed


def test_healthy_runs_have_no_fault(folder: Path) -> None:
    outcomes: list[Outcome] = [outcome(run, folder) for run in HEALTHY]
    found = {each.run.name: {name: each.findings[name].measured for name in each.faults} for each in outcomes}
    assert len(outcomes) == 5 and found == {run.name: {} for run in HEALTHY}

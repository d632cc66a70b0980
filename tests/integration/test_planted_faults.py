"""Planted faults are found by `mobula diagnose`, and healthy runs have no fault.

MOBULA_PLANTED_RUNS names a folder that keeps the runs: those that it holds are not made again. Without it the tests are
skipped: the runs take half an hour on two cores, and a part of `make test-all` is not to take so long.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from planted_faults import FAULTS, FURTHER, HEALTHY, Outcome, outcome

VARIABLE = "MOBULA_PLANTED_RUNS"
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.timeout(4 * 3600),
    pytest.mark.skipif(VARIABLE not in os.environ, reason=f"half an hour: set {VARIABLE}=FOLDER"),
]
FIRST = ("temperature_3", "rate_01", "coin_flip", "late_reward")
LEAST = 0.9  # of the planted faults


@pytest.fixture(scope="module")
def folder() -> Path:
    return Path(os.environ[VARIABLE]).resolve()


def test_nine_of_ten_planted_faults_are_found_by_a_check_that_names_them(folder: Path) -> None:
    outcomes = [outcome(run, folder) for run in FAULTS]
    missed = [each.run.name for each in outcomes if not each.found]
    assert len(outcomes) >= 20 and len(missed) <= (1 - LEAST) * len(outcomes), missed


def test_causes_come_before_the_symptoms_that_they_cause(folder: Path) -> None:
    ranks = {run.name: outcome(run, folder).rank for run in FURTHER if run.name in FIRST}
    assert ranks == dict.fromkeys(FIRST, 1)


def test_healthy_runs_have_no_fault(folder: Path) -> None:
    outcomes: list[Outcome] = [outcome(run, folder) for run in HEALTHY]
    found = {each.run.name: {name: each.findings[name].measured for name in each.faults} for each in outcomes}
    assert len(outcomes) >= 5 and found == {run.name: {} for run in HEALTHY}

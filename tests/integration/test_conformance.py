"""Engine and learner compute the same for every family, before and after pushes; three of them in every run."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.conformance.__main__ import measure_apart
from deploy.conformance.measure import REPORT, read_report
from deploy.conformance.table import failures
from learner.policies.families import family_at
from learner.policies.tiny import TINY

pytestmark = [pytest.mark.slow, pytest.mark.families, pytest.mark.timeout(1300)]

USUAL = ("qwen2.5-vl", "qwen3-vl", "internvl3")
OTHERS = [name for name in (*TINY, *(f"{name}+tied" for name in TINY)) if name not in USUAL]


def check(name: str, folder: Path) -> None:
    if name.startswith("smolvlm"):
        pytest.importorskip("num2words", reason="its processor needs mobula[smolvlm]")
    measure_apart(name, folder)
    report = read_report(folder / REPORT)
    assert failures(report) == []
    family = family_at(str(folder / "model"))
    assert set(report.moved) == {*family.parts, "all weights"}
    assert len(report.gaps) == (6 if family.takes_pictures else 1)
    assert report.num_parameters < 3_000_000


@pytest.mark.parametrize("name", USUAL)
def test_the_most_used_families(name: str, tmp_path: Path) -> None:
    check(name, tmp_path / name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OTHERS)
def test_every_other_family(name: str, tmp_path: Path) -> None:
    check(name, tmp_path / name)

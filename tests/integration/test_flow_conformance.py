"""Sampler, learner and plain diffusers agree for every family of flow models; one of them in every run."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.conformance.flow.measure import measure
from deploy.conformance.flow.table import failures
from learner.policies.flow.tiny import TINY_FLOW

pytestmark = [pytest.mark.slow, pytest.mark.families, pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(600)]

USUAL = "wan"
OTHERS = [pytest.param(name, marks=pytest.mark.exhaustive) for name in TINY_FLOW if name not in (USUAL, "sd3_glyphs")]


@pytest.mark.parametrize("name", [USUAL, *OTHERS])
def test_a_family_conforms(tmp_path: Path, name: str) -> None:
    report = measure(name, tmp_path)
    assert failures(report) == []
    assert report.frames[0] == (5 if name in ("wan", "cosmos2.5") else 1)
    assert report.num_parameters < 1_000_000

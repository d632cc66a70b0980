"""`python -m mobula.deploy.checks.gpu_check --device cpu` where most of this project's packages are not installed."""

from __future__ import annotations

from pathlib import Path

import pytest
from absent_packages import run_without_packages

from mobula.deploy.checks.gpu_check.check import RESULTS_FILE, STAGES, Outcome, read_results

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ON_A_BARE_CPU = ("torch_cuda", "learner", "packing", "sharding", "flow", "logprob_memory", "sleep", "throughput")


def test_every_stage_of_a_bare_machine_passes_and_the_others_say_what_is_missing(tmp_path: Path) -> None:
    named = [stage.name for stage in STAGES if stage.name != "pretrained"]  # whose package is here
    words = [word for name in named for word in ("--only", name)]
    done = run_without_packages(
        ["-m", "mobula.deploy.checks.gpu_check", "--device", "cpu", "--folder", str(tmp_path), *words], timeout_s=570
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = read_results(tmp_path / RESULTS_FILE).stages
    assert {name for name, stage in found.items() if stage.outcome is Outcome.PASSED} == set(ON_A_BARE_CPU)
    for name in set(named) - set(ON_A_BARE_CPU):
        assert found[name].outcome is Outcome.NOT_HERE and found[name].cause
    assert found["learner"].figures["media"] == "image"

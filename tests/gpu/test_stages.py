"""Every stage of `mobula gpu-check` on the GPUs of this machine: each in its own process, with nothing beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpus import NUM_GPUS

from mobula.deploy.checks.gpu_check.check import STAGES, CheckOptions, CheckStage, Outcome, check
from mobula.deploy.checks.gpu_check.training import PRETRAINED_FOLDER

# Two engines would each ask for most of a card's memory.
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1200)]


def case(stage: CheckStage) -> object:
    missing = "an NVIDIA GPU that torch can use" if NUM_GPUS == 0 else stage.unmet(NUM_GPUS)
    marks = [pytest.mark.skipif(bool(missing), reason=f"needs {missing}")]
    marks += [pytest.mark.two_gpus] if stage.num_gpus == 2 else []
    return pytest.param(stage.name, marks=marks, id=stage.name)


@pytest.mark.parametrize("name", [case(stage) for stage in STAGES if not stage.missing])
def test_a_stage_of_the_check_passes(tmp_path: Path, name: str) -> None:
    found = check(CheckOptions("cuda", tmp_path, (name,)), lambda line: None).stages[name]
    if name == "pretrained" and found.outcome is Outcome.NOT_HERE:
        pytest.skip(f"{found.cause}; {PRETRAINED_FOLDER} may be a checkpoint that was downloaded before")
    assert found.outcome is Outcome.PASSED, f"{found.cause}\n{(tmp_path / f'{name}.log').read_text()[-4000:]}"

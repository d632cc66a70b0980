"""`python -m mobula.deploy.checks.gpu_check --device cpu` where most of this project's packages are not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import REPOSITORY

from mobula.deploy.checks.gpu_check.check import RESULTS_FILE, STAGES, Outcome, read_results

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Packages of the project that a machine for `gpu_check` may lack.
ABSENT = (
    "aiohttp,deepspeed,diffusers,fastapi,fastapi_offline,mistral_common,msgspec,prometheus_client,psutil,pynvml,ray,"
    "rapidfuzz,rich,scipy,sklearn,tensorboard,torchao,typer,uvicorn,vllm"
)
ON_A_BARE_CPU = ("torch_cuda", "learner", "packing", "sharding", "flow", "logprob_memory", "sleep", "throughput")


def test_every_stage_of_a_bare_machine_passes_and_the_others_say_what_is_missing(tmp_path: Path) -> None:
    named = [stage.name for stage in STAGES if stage.name != "pretrained"]  # whose package is here
    words = [word for name in named for word in ("--only", name)]
    paths = os.pathsep.join([str(REPOSITORY / "tests" / "support" / "absent"), str(REPOSITORY)])
    environment = {**os.environ, "PYTHONPATH": paths, "ABSENT_PACKAGES": ABSENT}
    command = [sys.executable, "-m", "mobula.deploy.checks.gpu_check", "--device", "cpu", "--folder", str(tmp_path)]
    done = subprocess.run(
        [*command, *words], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=570
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = read_results(tmp_path / RESULTS_FILE).stages
    assert {name for name, stage in found.items() if stage.outcome is Outcome.PASSED} == set(ON_A_BARE_CPU)
    for name in set(named) - set(ON_A_BARE_CPU):
        assert found[name].outcome is Outcome.NOT_HERE and found[name].cause
    assert found["learner"].figures["media"] == "image"

"""A push reaches every rank of engines that are split over several GPUs: real processes over gloo, without vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("split_engines.py")


@pytest.mark.slow
def test_every_rank_of_every_engine_receives_every_tensor_of_each_push() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ranks"] == [[1, 2], [3, 4]], "rank 0 sends"
    assert found["equal"] == [True] * 8, "two pushes, two engines, two ranks"

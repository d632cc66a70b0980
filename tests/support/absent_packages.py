"""Programs that run as on a GPU machine without this project's environment: listed packages cannot be imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Packages of the project that a machine for `gpu_check` may lack.
ABSENT = (
    "aiohttp deepspeed diffusers fastapi fastapi_offline mistral_common msgspec "
    "prometheus_client psutil pynvml ray rapidfuzz rich scipy sklearn tensorboard "
    "torchao typer uvicorn vllm"
).split()


def run_without_packages(
    words: Sequence[str], *, timeout_s: float, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """`python *words` in a process, and in its children, for which the packages of `ABSENT` are not installed."""
    path = [str(ROOT / "tests" / "support" / "absent"), str(ROOT)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "ABSENT_PACKAGES": ",".join(ABSENT)}
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout_s
    )

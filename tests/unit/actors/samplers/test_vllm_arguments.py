"""Who only asks how an engine of ours is made has vLLM as it comes: benchmarks measure against that."""

from __future__ import annotations

import subprocess
import sys

IMPORTS = """
import sys
import benchmarks.raw.raw_vllm, actors.samplers.vllm.arguments
print(*sorted(name for name in sys.modules if name.startswith("actors.samplers.vllm")))
"""


def test_asking_for_arguments_brings_nothing_that_changes_vllm() -> None:
    found = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["actors.samplers.vllm", "actors.samplers.vllm.arguments"]

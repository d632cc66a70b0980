"""A Mobula command as one side: runs it in a separate process, and reads its steps from the run folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.peers.step_clock import Run
from mobula.cluster.metrics.definitions import MetricName
from mobula.cluster.metrics.report.run_folder import read_run_folder


def main(command: str, folder: str, *words: str) -> None:
    """`command` is `train`, `sft` or `dpo`; the run's folder is `folder`/run, and must not be there."""
    where = (f"folder={folder}", "name=run", "metrics.progress=false")
    subprocess.run([sys.executable, "-m", "mobula.deploy.cli", command, *words, *where], check=True)
    steps = read_run_folder(Path(folder) / "run").steps
    Run(
        seconds=[step.seconds["total"] for step in steps],
        samples=[int(step.values[MetricName.NUM_SAMPLES]) for step in steps],
        tokens=[int(step.values[MetricName.NUM_TOKENS]) for step in steps],
    ).print()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A Mobula command as one side: runs it in a separate process, and reads its steps from the run folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.peers.step_clock import Run
from mobula.cluster.metrics.definitions import MetricName
from mobula.cluster.metrics.report.run_folder import RunFolder, read_run_folder


def main(command: str, accuracy: str, folder: str, *words: str) -> None:
    """`command` is `train`, `sft` or `dpo`; the run's folder is `folder`/run, and must not be there. `accuracy` is the
    held-out accuracy whose time is asked for, 0 for none."""
    where = (f"folder={folder}", "name=run", "metrics.progress=false")
    subprocess.run([sys.executable, "-m", "mobula.deploy.cli", command, *words, *where], check=True)
    run = read_run_folder(Path(folder) / "run")
    Run(
        seconds=[step.seconds["total"] for step in run.steps],
        samples=[int(step.values[MetricName.NUM_SAMPLES]) for step in run.steps],
        tokens=[int(step.values[MetricName.NUM_TOKENS]) for step in run.steps],
        reached_s=_reached_s(run, float(accuracy)) if float(accuracy) else None,
    ).print()


def _reached_s(run: RunFolder, accuracy: float) -> float | None:
    """Seconds of steps, without evaluations, until the first weights that are evaluated at `accuracy` or more."""
    reached = [e.version for e in run.evaluations if e.accuracy >= accuracy]
    if not reached:
        return None
    return sum(s.seconds["total"] - s.seconds.get("evaluation", 0.0) for s in run.steps if s.step <= reached[0])


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Runs `mobula gpu-check`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mobula.deploy.checks.gpu_check.check import STAGES, CheckOptions, run_check

FOLDER = Path("runs/gpu-check")


def main() -> int:
    """Exit code 1 if a stage failed."""
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--only", action="append", default=[], metavar="STAGE", choices=[s.name for s in STAGES])
    parser.add_argument("--all", action="store_true", help="long stages on a CPU too")
    parser.add_argument("--minutes", type=float, help="time of this call; the next one goes on")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the results and logs")
    given = parser.parse_args()
    budget_s = None if given.minutes is None else 60 * given.minutes
    return run_check(CheckOptions(given.device, given.folder, tuple(given.only), given.all, budget_s))


if __name__ == "__main__":
    sys.exit(main())

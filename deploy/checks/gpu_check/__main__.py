"""Runs `mobula gpu-check`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mobula.deploy.checks.gpu_check.check import CheckOptions, check, failed
from mobula.deploy.checks.gpu_check.results import STAGES, table

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


def run_check(options: CheckOptions) -> int:
    """Prints a line for each stage as it ends, and the table of all finished ones; returns the exit code."""

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    try:
        results = check(options, say)
    except ValueError as error:
        say(str(error))
        return 2
    say("\n" + table(results))
    return 1 if failed(results) else 0


if __name__ == "__main__":
    sys.exit(main())

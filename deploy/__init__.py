"""The wiring of a run, its commands, and the files of deployments."""

import sys
from pathlib import Path


def find_checkout() -> None:
    """Makes this checkout the `mobula` to import; Ray calls it in the workers of a job that brings a checkout."""
    package = str(Path(__file__).resolve().parent / "package")
    if package not in sys.path[:1]:
        sys.path.insert(0, package)


if __name__ == "deploy":  # `python -m deploy.cli` in a checkout, installed or not
    find_checkout()

"""The code is as `ruff format` writes it, and `ruff check` finds nothing, with the settings of pyproject.toml."""

from __future__ import annotations

import subprocess
import sys

import pytest
from sources import ROOT


@pytest.mark.parametrize("words", [("format", "--diff"), ("check",)], ids=["format", "check"])
def test_ruff_would_change_nothing(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "ruff", *words, "--quiet", "--no-cache", "."]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr

"""Every script in examples/ is one `mobula train` command whose words make a valid configuration."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from mobula.configs.load import load_config

REPOSITORY = Path(__file__).parents[3]
SCRIPTS = sorted((REPOSITORY / "examples").glob("*.sh"))


def words_of(script: Path, folder: Path, *more: str) -> list[str]:
    """What the script hands to `mobula`."""
    command = folder / "mobula"
    command.write_text('#!/usr/bin/env bash\nprintf "%s\\0" "$@"\n')
    command.chmod(0o755)
    settings = {"MOBULA": str(command), "MODEL": "model", "DATA": "data", "PATH": os.environ["PATH"]}
    done = subprocess.run([script, *more], env=settings, capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.split("\0")[:-1]


def test_there_are_examples() -> None:
    assert len(SCRIPTS) >= 3


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_an_example_is_a_valid_configuration(script: Path, tmp_path: Path) -> None:
    command, *words = words_of(script, tmp_path, "seed=7")
    assert command == "train"
    config = load_config(words)
    assert config.seed == 7 and config.name.startswith("example-")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_the_readme_of_the_examples_names_it(script: Path) -> None:
    assert f"`{script.name}`" in (REPOSITORY / "examples" / "README.md").read_text()

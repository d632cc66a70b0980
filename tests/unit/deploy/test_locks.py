"""The locks of `make environment` have an allowed version of every requirement of pyproject.toml, and no address."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[3]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def required(*extras: str) -> list[Requirement]:
    """Direct requirements of the project with these extras, and with the project's extras that they name."""
    lines = list(PROJECT["dependencies"])
    left = list(extras)
    while left:
        for requirement in map(Requirement, PROJECT["optional-dependencies"][left.pop()]):
            if requirement.name == PROJECT["name"]:
                left += requirement.extras
            else:
                lines.append(str(requirement))
    return [Requirement(line) for line in lines]


@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_a_lock_has_an_allowed_version_of_every_requirement(extra: str) -> None:
    text = (REPOSITORY / "deploy" / "locks" / f"{extra}.txt").read_text(encoding="utf-8")
    assert "://" not in text and " @ " not in text
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    pins = (line.partition(" ;")[0].partition("==") for line in lines)
    locked = {canonicalize_name(name): version for name, _, version in pins}
    unfit = [
        str(requirement)
        for requirement in required(extra, "test")
        if (version := locked.get(canonicalize_name(requirement.name))) is None or version not in requirement.specifier
    ]
    assert unfit == [], "run deploy/locks/update.sh"

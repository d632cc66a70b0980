"""The table of capabilities in docs/algorithms.md names keys and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

from mobula.configs import keys

REPOSITORY = Path(__file__).parents[3]
PAGE = (REPOSITORY / "docs" / "algorithms.md").read_text(encoding="utf-8")
ELSEWHERE = {"overlong", "http", "reward_model"}  # no keys: components of the reward


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    below = PAGE.split(f"{heading}\n", 1)[1].splitlines()
    first = next(n for n, line in enumerate(below) if line.startswith("|"))
    table = below[first:]
    table = table[: next(n for n, line in enumerate(table) if not line.startswith("|"))]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[2:]]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def exists(text: str, beside: str) -> bool:
    """Whether `text` (KEY, KEY=VALUE, GROUP=OPTION) names something that a run has, or the key `beside` it has."""
    name, _, value = text.partition("=")
    if (REPOSITORY / "configs" / name / f"{value}.yaml").is_file():
        return True
    known, first = keys.known_keys(), beside.partition("=")[0]
    as_sibling = f"{first.rpartition('.')[0]}.{name}"  # `algorithm.num_epochs`, `num_minibatches`
    as_value = known[first].expected.split() if first in known else ()  # `algorithm.loss=gspo`, `gspo_token`
    is_key = any(key == name or key.startswith(f"{name}.") for key in known)
    return is_key or as_sibling in known or name in [word.strip(",") for word in as_value]


def test_every_capability_has_a_key_that_exists() -> None:
    found = [(row[0], quoted(row[1])) for row in rows("## Table of capabilities")]
    missing = [(what, text) for what, words in found for text in words if not exists(text, words[0])]
    assert [pair for pair in missing if pair[1] not in ELSEWHERE] == []
    assert exists("algorithm.loss=gspo", "") and not exists("algorithm.lose", "algorithm.loss")


def test_every_capability_has_tests_that_exist() -> None:
    files = {path.name for path in (REPOSITORY / "tests").rglob("test_*.py")}
    named = {name for row in rows("## Table of capabilities") for name in quoted(row[2]) if name.startswith("test_")}
    assert len(named) > 30
    assert named - files == set()
    without = [row[0] for row in rows("## Table of capabilities") if not quoted(row[2]) and row[2] != "the same"]
    assert without == []

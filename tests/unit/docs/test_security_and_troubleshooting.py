"""Every rule of docs/security.md names a test that exists; every error is in docs/troubleshooting.md with a command."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from cluster import errors
from configs.errors import ConfigError

REPOSITORY = Path(__file__).parents[3]
SECURITY = (REPOSITORY / "docs" / "security.md").read_text(encoding="utf-8")
TROUBLES = (REPOSITORY / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
RULES = re.findall(r"^\| (.+?) \| `(tests/\S+)::(test_\w+)` \|$", SECURITY, re.MULTILINE)
KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.MobulaError) and kind is not errors.MobulaError
]


def test_every_line_of_the_rules_has_a_test() -> None:
    table = SECURITY.partition("## Rules")[2].partition("## Exceptions")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| rule")]
    assert len(rows) == len(RULES) >= 15


@pytest.mark.parametrize(("rule", "path", "name"), RULES, ids=[name for _, _, name in RULES])
def test_the_test_of_a_rule_is_there(rule: str, path: str, name: str) -> None:
    tree = ast.parse((REPOSITORY / path).read_text(encoding="utf-8"))
    defined = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    assert name in defined, rule


@pytest.mark.parametrize("kind", [*KINDS, ConfigError], ids=lambda kind: kind.__name__)
def test_every_error_is_found_with_symptom_cause_and_command(kind: type[Exception]) -> None:
    [row] = [line for line in TROUBLES.splitlines() if line.startswith(f"| `{kind.__name__}` |")]
    cells = [cell.strip() for cell in row.strip("|").split(" | ")]
    assert len(cells) == 5 and all(cells)
    assert re.fullmatch(r"`[^`]+`", cells[4]), "the last column is a command"


def test_reasons_for_which_samples_are_skipped_are_found() -> None:
    reasons = {kind.reason for kind in errors.SkippedSample.__subclasses__()}
    assert len(reasons) >= 4 and all(f"`{reason}`" in TROUBLES for reason in reasons)

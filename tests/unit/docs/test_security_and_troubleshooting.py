"""Every rule of SECURITY.md names a test that exists; every error is in docs/troubleshooting.md with a command."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from mobula.cluster import errors
from mobula.configs.errors import ConfigError
from mobula.configs.load import load_config
from mobula.deploy.reference import error_messages

REPOSITORY = Path(__file__).parents[3]
SECURITY = (REPOSITORY / "SECURITY.md").read_text(encoding="utf-8")
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


def test_every_message_is_on_the_page_of_messages_under_its_kind() -> None:
    assert error_messages.TARGET.read_text(encoding="utf-8") == error_messages.text(), (
        "run `python -m mobula.deploy.reference.error_messages`"
    )
    found = error_messages.messages()
    assert len(found) > 200
    rows = {line.split("`")[1] for line in TROUBLES.splitlines() if line.startswith("| `")}
    assert {message.kind for message in found} <= rows, "a kind without cause and command"


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["algorithm.num_minibatches=9", "algorithm.prompts_per_step=4"], "ConfigError"),
        (["metrics.trackers=[wandb,mlflow]", "metrics.tracker_address=http://there"], "ConfigError"),
        (["resources.rollout.tensor_parallel=2"], "ConfigError"),
    ],
)
def test_a_message_as_a_user_sees_it_is_found_by_its_words(words: list[str], kind: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(["experiment=digits", *words])
    known = [m for m in error_messages.messages() if m.kind == kind]
    shown = " ".join(str(refused.value).split()).replace("`", "'")
    assert any(all(part in shown for part in m.text.split(error_messages.GAP)) for m in known)


def test_messages_are_read_from_the_code() -> None:
    source = """
def f(name):
    raise PreflightError(f"there is no run {name}: give the run's `NAME`" + " or its folder")
    raise KeyError("not one of ours, but long enough")
    raise PreflightError(str(name))
"""
    [message] = error_messages.messages_of(source, "deploy/x.py")
    assert message.text == "there is no run \u2026: give the run's 'NAME' or its folder"

"""Top-level folders are fixed, no module prints, and every module has a docstring."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from sources import ROOT, Source, parse, sources

NAMES_OF_MODELS = ("learner/policies/families/", "learner/policies/tiny/")
TOP_FOLDERS = {"actors", "benchmarks", "cluster", "configs", "deploy", "docs", "examples", "learner", "rewards"} | {
    "tests"
}


def ignored_folders() -> set[str]:
    """Folders at the root that .gitignore names: results, data, caches."""
    lines = (ROOT / ".gitignore").read_text().split()
    return {line.strip("/") for line in lines if line.endswith("/")}


def prints(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield f"{source.path}:{node.lineno}"


def test_the_top_level_folders_are_those_of_the_design() -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    built = {name for name in folders if name.endswith(".egg-info")}
    assert folders - ignored_folders() - built == TOP_FOLDERS


def test_nothing_prints() -> None:
    assert [place for source in sources() for place in prints(source)] == []


def test_every_module_has_a_docstring() -> None:
    silent = [source.path for source in sources() if source.text.strip() and not ast.get_docstring(source.tree)]
    assert silent == []


def test_no_file_names_are_twins_of_a_modality() -> None:
    others = [source.path for source in sources() if not source.path.startswith(NAMES_OF_MODELS)]
    twins = [path for path in others if path.removesuffix(".py").endswith(("_vl", "_v2", "_new"))]
    assert twins == []


@pytest.mark.parametrize(("text", "found"), [("print(1)", 1), ("console.print(1)", 0), ("def f():\n    print()", 1)])
def test_a_print_is_seen(text: str, found: int) -> None:
    assert len(list(prints(parse("cluster/x.py", text)))) == found

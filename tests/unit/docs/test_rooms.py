"""Every room (a folder of two levels that holds modules) has a README, and all that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TOPS = ("configs", "cluster", "actors", "learner", "rewards", "deploy")
ROOMS = sorted({path.parent.relative_to(ROOT).as_posix() for top in TOPS for path in (ROOT / top).glob("*/*.py")})
SPAN = re.compile(r"`([^`\n]+)`")
NOUN = re.compile(r"`(\w+)`\s+\(`([\w/]+\.py)`\)")
PATH = re.compile(r"[\w./-]+(?:/|\.py)|(?:configs|docs|tests|cluster|actors|learner|rewards|deploy)/[\w./-]+")
NAME = re.compile(r"[A-Z][A-Za-z0-9_]+|[a-z]+(?:_[a-z]+)+")
KEY = re.compile(r"(?:data|environment|algorithm|learner|resources|sampler|metrics|rewards|policy)\.[a-z_]+")


def text_of(room: str) -> str:
    return (ROOT / room / "README.md").read_text(encoding="utf-8")


def defined_in(module: Path) -> set[str]:
    """Names that a module defines at its top level."""
    names: set[str] = set()
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


DEFINED = {
    name for top in (*TOPS, "tests/integration") for path in (ROOT / top).rglob("*.py") for name in defined_in(path)
}


KEYS = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")


def missing(room: str, text: str) -> list[str]:
    """Paths that are neither in the room nor in the repository, names that no module defines, and unknown keys."""
    found = []
    for span in SPAN.findall(text):
        if PATH.fullmatch(span):
            if not (ROOT / room / span).exists() and not any((ROOT / room).glob(f"*/{span}")):
                found += [span] if not (ROOT / span).exists() else []
        elif NAME.fullmatch(span) and span not in DEFINED | {"Literal"}:
            found.append(span)
        elif KEY.fullmatch(span) and f"| `{span}" not in KEYS:
            found.append(span)
    for name, path in NOUN.findall(text):
        modules = [folder / path for folder in (ROOT / room, ROOT) if (folder / path).is_file()]
        found += [f"{name} of {path}"] if not modules or name not in defined_in(modules[0]) else []
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_a_readme_whose_names_exist(room: str) -> None:
    text = text_of(room)
    assert 8 <= len(text.splitlines()) <= 25
    assert text.startswith(f"# {room}\n")
    assert [
        part for part in ("Enters", "Leaves", "Nouns", "Read first", "One more") if f"**{part}:**" not in text
    ] == []
    assert NOUN.search(text), "it names no class or function with its module"
    assert missing(room, text) == []


def test_a_name_or_path_that_is_not_there_is_seen() -> None:
    text = (
        "`loop.py`, `cluster/nowhere/`, `NoSuchClass`, `data.nothing`, "
        "`Manifest` (`transport.py`), `Manifest` (`manifest.py`)"
    )
    assert missing("cluster/weight_sync", text) == [
        "loop.py",
        "cluster/nowhere/",
        "NoSuchClass",
        "data.nothing",
        "Manifest of transport.py",
    ]

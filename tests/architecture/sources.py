"""The project's own Python files, parsed once, and what they import."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("configs", "cluster", "rewards", "learner", "actors", "deploy", "examples")


@dataclass(frozen=True)
class Source:
    """One Python file; `path` is relative to the repository."""

    path: str
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.path.split("/")[0]

    def imports(self) -> Iterator[str]:
        """Every dotted name that is imported, at the top, inside functions and for type checking alike; names of the
        project without `mobula.` in front.
        """
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (within_project(alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.path}:{node.lineno} imports relatively: write the whole name"
                yield from (within_project(f"{node.module}.{alias.name}") for alias in node.names)


def within_project(name: str) -> str:
    """`mobula.cluster.errors` -> `cluster.errors`; a name of another package stays."""
    return name.removeprefix("mobula.")


@cache
def sources() -> tuple[Source, ...]:
    """All files of the packages."""
    scripts = [ROOT / "examples" / name for name in ("notebook.py", "training_service.py")]  # of users
    paths = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if path not in scripts)
    return tuple(_read(path) for path in paths)


def parse(path: str, text: str) -> Source:
    # CPython before 3.11.8 counts the depth of all trees in one place. A garbage collection lets another thread run; if
    # that thread parses, too, the count is wrong (SystemError, python/cpython#106905).
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        return Source(path, text, ast.parse(text, filename=path))
    finally:
        if is_collecting:
            gc.enable()


def _read(path: Path) -> Source:
    return parse(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))

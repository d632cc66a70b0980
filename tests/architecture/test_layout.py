"""No two folders of a package import each other."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator

import pytest
from sources import ROOT, Source, parse, sources

# Packages that still have a cycle: {package: which}. Keep it empty.
LOOPS: dict[str, str] = {}


def module_of(source: Source) -> str:
    """The dotted name of a file; a package's own file has the package's name."""
    return source.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported_modules(source: Source, modules: Iterable[str]) -> Iterator[str]:
    known = set(modules)
    for name in source.imports():
        while name and name not in known:  # a name in a module, or a module
            name = name.rpartition(".")[0]
        if name:
            yield name


def arrows(all_sources: Iterable[Source]) -> dict[str, dict[str, dict[str, str]]]:
    """package -> child -> imported child -> an import that shows it; children are sub-packages and modules."""
    listed = {module_of(source): source for source in all_sources}
    found: dict[str, dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for module, source in listed.items():
        for target in imported_modules(source, listed):
            here, there = module.split("."), target.split(".")
            depth = next((i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), None)
            if depth:  # they share a package, and neither is the package of the other
                package = ".".join(here[:depth])
                found[package][here[depth]].setdefault(there[depth], f"{module} imports {target}")
    return found


def cycles(graph: dict[str, dict[str, str]]) -> list[str]:
    """Every child that reaches itself, with the imports on the way."""
    found = []
    for start in graph:
        paths = [[start]]
        seen = set()
        while paths:
            path = paths.pop()
            for child in graph.get(path[-1], {}):
                if child == start:
                    steps = zip(path, [*path[1:], start], strict=True)
                    found.append("; ".join(graph[a][b] for a, b in steps))
                    paths = []
                    break
                if child not in seen:
                    seen.add(child)
                    paths.append([*path, child])
    return found


def test_no_folders_import_each_other() -> None:
    folders = {source.path.rpartition("/")[0].replace("/", ".") for source in sources()}
    found = {}
    for package, graph in arrows(sources()).items():
        if package not in LOOPS and any(f"{package}.{child}" in folders for child in graph):
            found[package] = cycles(graph)
    assert {package: loops for package, loops in found.items() if loops} == {}


def test_no_modules_of_the_configuration_import_each_other() -> None:
    listed = {module_of(source): source for source in sources() if source.package == "configs"}
    graph = {
        module: {target: f"{module} imports {target}" for target in imported_modules(source, listed)}
        for module, source in listed.items()
    }
    assert cycles(graph) == []


@pytest.mark.parametrize(
    ("files", "num"),
    [
        ({"b/y": "from cluster.a.x import f"}, 2),
        ({"b/y": "import cluster.c", "c": "import cluster.a.x"}, 3),
        ({"b/y": "import cluster.b.z", "b/z": ""}, 0),
    ],
)
def test_a_cycle_is_seen(files: dict[str, str], num: int) -> None:
    files = {"a/x": "import cluster.b.y", **files}
    graph = arrows([parse(f"cluster/{path}.py", text) for path, text in files.items()])["cluster"]
    assert len(cycles(graph)) == num


@pytest.mark.parametrize("words", [("format", "--diff"), ("check",)], ids=["format", "check"])
def test_ruff_would_change_nothing(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "ruff", *words, "--quiet", "--no-cache", "."]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr

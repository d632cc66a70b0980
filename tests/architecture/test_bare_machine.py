"""What `mobula gpu-check` runs on a GPU machine without this project's environment needs few packages there."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator

import pytest
from sources import PACKAGES, Source, parse, sources, within_project
from test_layout import module_of

# Modules that the stages for such a machine import.
ENTRIES = (
    "learner.learner", "learner.backends.sharded", "actors.samplers.huggingface", "actors.samplers.base",
    "actors.processors.chat", "configs.load",
)  # fmt: skip
PRESENT = {"PIL", "httpx", "huggingface_hub", "numpy", "pyarrow", "safetensors", "tokenizers", "torch", "transformers"}
PRESENT |= {"hydra", "omegaconf", "pydantic", "pydantic_core", "yaml"}


def import_time(nodes: Iterable[ast.stmt]) -> Iterator[str]:
    """Dotted names that a module imports when it is imported itself."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (within_project(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (within_project(f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from import_time(node.orelse)
        elif isinstance(node, ast.If | ast.Try | ast.ExceptHandler | ast.With | ast.ClassDef):
            yield from import_time(ast.iter_child_nodes(node))  # type: ignore[arg-type]


def needed_packages(entries: Iterable[str], found: Iterable[Source]) -> dict[str, str]:
    """Third-party package -> a module that imports it, of `entries` and all that they import."""
    modules = {module_of(source): source for source in found}
    packages: dict[str, str] = {}
    pending, seen = list(entries), set()
    while pending:
        module = pending.pop()
        if module in seen:
            continue
        seen.add(module)
        pending += [module.rpartition(".")[0]] if "." in module else []
        for name in import_time(modules[module].tree.body):
            inner = name
            while inner and inner not in modules:
                inner = inner.rpartition(".")[0]
            top = name.partition(".")[0]
            if inner:
                pending.append(inner)
            elif top not in sys.stdlib_module_names and top not in PACKAGES:
                packages.setdefault(top, module)
    return packages


@pytest.mark.parametrize("entry", ENTRIES)
def test_learner_and_samplers_import_no_package_that_such_a_machine_lacks(entry: str) -> None:
    needed = needed_packages([entry], sources())
    assert {package: module for package, module in needed.items() if package not in PRESENT} == {}


def test_an_import_at_the_top_is_seen_and_one_in_a_function_is_not() -> None:
    files = {
        "learner/a.py": "from learner.b import f",
        "learner/b.py": "import ray\ndef f():\n    import vllm",
        "learner/__init__.py": "",
    }
    assert needed_packages(["learner.a"], [parse(p, text) for p, text in files.items()]) == {"ray": "learner.b"}


def test_imports_in_try_and_for_type_checking() -> None:
    text = "try:\n    import a\nexcept ImportError:\n    import b\nif TYPE_CHECKING:\n    import c"
    assert list(import_time(ast.parse(text).body)) == ["a", "b"]

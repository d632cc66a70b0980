"""Figures of the code's shape, to compare two commits: `python tests/architecture/report.py [CHECKOUT]`. No limits."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

PACKAGES = ("actors", "cluster", "configs", "deploy", "learner", "rewards")
ENTRY = "deploy.run.runtime"  # what `mobula train` imports
SMALL_LINES = 8
# Comments that a tool reads, and rules between parts of a file.
NO_REASON = re.compile(r"#\s*(noqa|type:|pragma|fmt:|isort|!|-{3,}|={3,})")


class Checkout:
    """The product's Python files of a checkout, parsed once."""

    def __init__(self, root: Path) -> None:
        paths = sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))
        self.texts = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths}
        self.trees = {path: ast.parse(text) for path, text in self.texts.items()}
        self.modules = {
            path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in self.trees
        }

    def nodes(self, *kinds: type[ast.AST]) -> list[ast.AST]:
        return [node for tree in self.trees.values() for node in ast.walk(tree) if isinstance(node, kinds)]

    def num_lines(self) -> int:
        """Lines with code or a docstring: neither blank nor a comment alone."""
        lines = [line.strip() for text in self.texts.values() for line in text.splitlines()]
        return sum(1 for line in lines if line and not line.startswith("#"))

    def protocols(self) -> dict[str, set[str]]:
        """Protocol -> the names of its methods and annotated members."""
        classes = [node for node in self.nodes(ast.ClassDef) if isinstance(node, ast.ClassDef)]
        return {
            node.name: _members(node) for node in classes if any("Protocol" in ast.unparse(base) for base in node.bases)
        }

    def single_implementers(self) -> list[str]:
        """Protocols whose methods one class of the product has, or none."""
        classes = [node for node in self.nodes(ast.ClassDef) if isinstance(node, ast.ClassDef)]
        protocols = self.protocols()
        members = {node.name: _members(node) for node in classes if node.name not in protocols}
        return [name for name, wanted in protocols.items() if sum(wanted <= have for have in members.values()) <= 1]

    def small_helpers(self) -> int:
        """Functions of at most 8 lines that are referenced once in the product."""
        functions = [n for n in self.nodes(ast.FunctionDef, ast.AsyncFunctionDef) if not n.name.startswith("__")]
        words = Counter(word for text in self.texts.values() for word in re.findall(r"\w+", text))
        return sum(n.end_lineno - n.lineno < SMALL_LINES and words[n.name] == 2 for n in functions)

    def imports(self, module: str, *, at_import: bool) -> set[str]:
        """Modules of the project that this one imports, also inside of functions unless `at_import`."""
        tree = self.trees[self.modules[module]]
        nodes = _at_import(tree) if at_import else ast.walk(tree)
        found = set()
        for node in nodes:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{a.name}" for a in node.names]
            for name in names:
                inner = name.removeprefix("mobula.")
                while inner and inner not in self.modules:
                    inner = inner.rpartition(".")[0]
                found |= {inner} if inner and inner != module else set()
        return found

    def loaded(self, entry: str) -> set[str]:
        """Modules of the project that importing `entry` loads."""
        seen: set[str] = set()
        pending = [entry]
        while pending:
            module = pending.pop()
            if module not in seen:
                seen.add(module)
                pending += self.imports(module, at_import=True)
                pending += [module.rpartition(".")[0]] if module.rpartition(".")[0] in self.modules else []
        return seen

    def longest_chain(self) -> int:
        """Modules in the longest chain of imports without a repetition of a module's cycle."""
        depths: dict[str, int] = {}

        def depth(module: str, on_path: frozenset[str]) -> int:
            if module not in depths:
                path = on_path | {module}
                below = [depth(m, path) for m in self.imports(module, at_import=True) if m not in path]
                depths[module] = 1 + max(below, default=0)
            return depths[module]

        return max(depth(module, frozenset()) for module in self.modules)

    def reasons(self) -> int:
        """Comments of their own line or behind code, without those that a tool reads."""
        lines = [line for text in self.texts.values() for line in text.splitlines()]
        return sum(bool(re.search(r"(^|\s)# \S", line)) and not NO_REASON.search(line) for line in lines)


def _members(node: ast.ClassDef) -> set[str]:
    functions = {n.name for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    return functions - {"__init__"}


def _at_import(tree: ast.AST) -> list[ast.AST]:
    """Statements that run at import: not in functions, not for type checking."""
    found, pending = [], list(ast.iter_child_nodes(tree))
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
            continue
        found.append(node)
        pending += ast.iter_child_nodes(node)
    return found


def _tracked_lines(root: Path, *patterns: str) -> int:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=root, capture_output=True, text=True, check=True)
    return sum(len((root / path).read_text(encoding="utf-8").splitlines()) for path in set(listed.stdout.split()))


def report(root: Path) -> dict[str, float]:
    code = Checkout(root)
    num_lines = code.num_lines()
    return {
        "files": len(code.texts),
        "lines of code": num_lines,
        "functions per 1,000 lines": 1e3 * len(code.nodes(ast.FunctionDef, ast.AsyncFunctionDef)) / num_lines,
        "classes per 1,000 lines": 1e3 * len(code.nodes(ast.ClassDef)) / num_lines,
        "protocols": len(code.protocols()),
        "protocols with at most one implementer": len(code.single_implementers()),
        "functions of at most 8 lines, referenced once": code.small_helpers(),
        "longest import chain": code.longest_chain(),
        "modules loaded by a run": len(code.loaded(ENTRY)),
        "comments per 1,000 lines": 1e3 * code.reasons() / num_lines,
        "lines of tests": _tracked_lines(root, "tests/*.py"),
        "lines of docs": _tracked_lines(root, "docs/*.md", "*.md"),
    }


if __name__ == "__main__":
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    for name, value in report(root).items():
        sys.stdout.write(f"| {name} | {value:,.1f} |\n".replace(".0 |", " |"))

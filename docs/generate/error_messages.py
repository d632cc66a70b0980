"""Write docs/errors.md, messages of errors raised on purpose: `python -m docs.generate.error_messages`."""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from docs.generate.markdown import write_page

from mobula.cluster import errors
from mobula.configs.errors import ConfigError

ROOT = Path(__file__).parents[2]
PACKAGES = ("configs", "cluster", "actors", "learner", "rewards", "deploy", "examples")
TARGET = ROOT / "docs" / "errors.md"
GAP = "…"
CONFIGURATION = "configs/rules/"  # functions and rows hold the messages of a ConfigError
FIELD = re.compile(r"\{[^{}]*\}")  # of a row's message
LEAST_LETTERS = 12  # of a message's own words: fewer say nothing that could be searched for
HEAD = f"""\
# Error messages

Every message of an error that is raised on purpose, by its kind; `{GAP}` is a value. Search for the words of yours.
What each kind means, what to do and which command shows more is in [troubleshooting](troubleshooting.md#by-error).

Written by `python -m docs.generate.error_messages`; do not edit.
"""


@dataclass(frozen=True)
class ErrorMessage:
    """One message in the source."""

    kind: str
    text: str
    path: str


def kinds() -> tuple[str, ...]:
    """Names of the errors that a user may see."""
    own = [name for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.MobulaError)]
    return (ConfigError.__name__, *own)


@cache
def messages() -> tuple[ErrorMessage, ...]:
    """Returns the messages of all packages without duplicates, ordered by kind and text."""
    templates = {
        message
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for message in messages_of(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())
    }
    return tuple(sorted(templates, key=lambda message: (message.kind, message.text.lower(), message.path)))


def messages_of(source: str, path: str) -> Iterator[ErrorMessage]:
    """Yields the messages of one file."""
    known = set(kinds())
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Raise(exc=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[first, *_])):
                kind, text = name, template(first)
            case ast.Return(value=ast.JoinedStr() as first) if path.startswith(CONFIGURATION):
                kind, text = ConfigError.__name__, template(first)
            case ast.Call(func=ast.Name(id="RuleRow"), args=[_, ast.Constant(value=str() as row)]) if FIELD.search(row):
                kind, text = ConfigError.__name__, _in_line(FIELD.sub(GAP, row))
            case _:
                continue
        if kind in known and sum(map(str.isalpha, text)) >= LEAST_LETTERS:
            yield ErrorMessage(kind, text.strip(), path)


def template(node: ast.expr) -> str:
    """Returns a message with gaps for values; empty for a message that is built elsewhere."""
    match node:
        case ast.Constant(value=str() as text):
            return _in_line(text)
        case ast.JoinedStr(values=parts):
            return _in_line("".join(template(part) or GAP for part in parts))
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return _in_line((template(left) or GAP) + (template(right) or GAP))
        case _:
            return ""


def text() -> str:
    """Returns the page: a heading for each kind of error, and below it a list for each directory that raises it."""
    found: Mapping[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for message in messages():
        directory = message.path.rpartition("/")[0]
        found[message.kind][directory].append(f"- `{message.text}`")
    lines = []
    for kind, directories in sorted(found.items()):
        lines += [f"\n## `{kind}`"]
        for directory, texts in sorted(directories.items()):
            lines += [f"\nRaised in `{directory}`:\n", *texts]
    return "\n".join([HEAD.rstrip(), *lines, ""])


def _in_line(text: str) -> str:
    """Backticks would end the code that a message is shown as. Spaces at the ends belong to parts of a message."""
    start, end = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
    return f"{' ' if start else ''}{' '.join(text.split()).replace('`', chr(39))}{' ' if end and text.strip() else ''}"


def main() -> None:
    write_page(TARGET, text())


if __name__ == "__main__":
    main()

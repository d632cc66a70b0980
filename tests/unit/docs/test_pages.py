"""Links, tests, errors and paths that pages name exist."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
from docs.generate import error_messages
from docs.generate.markdown import chunks, shortened

from mobula.cluster import errors
from mobula.configs.errors import ConfigError
from mobula.configs.load import load_config

ROOT = Path(__file__).parents[3]

DOCS = sorted((ROOT / "docs").glob("*.md"))

PAGES = [*sorted(ROOT.glob("*.md")), *DOCS, ROOT / "examples" / "README.md"]

LINK = re.compile(r"\]\(([^)\s]+)\)")

TEST_FILE = re.compile(r"\b(test_\w+\.py)\b")

CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if "://" not in link and not (target.is_file() and (not anchor or anchor in anchors(target))):
            broken.append(link)
    return broken


def test_links_lead_somewhere() -> None:
    assert {page.name: links for page in PAGES if (links := broken_links(page))} == {}


def test_the_index_has_every_page() -> None:
    linked = set(LINK.findall((ROOT / "docs" / "README.md").read_text(encoding="utf-8")))
    assert {page.name for page in DOCS} - linked == {"README.md"}


def test_every_test_file_that_a_page_names_exists() -> None:
    names = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    named = {name for page in PAGES for name in TEST_FILE.findall(page.read_text(encoding="utf-8"))}
    assert len(named) > 50 and named - names == set()


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(
        "# A heading\n[x](a.md#a-heading) [y](b.md) [z](#none) [w](https://example.org/b.md)"
    )
    assert broken_links(tmp_path / "a.md") == ["b.md", "#none"]


SECTION = "## From a row of the data file to its gradient"

MAX_FILES = 28


def test_the_path_of_a_row_is_what_the_architecture_says() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.split(SECTION)[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+\.py)` \| (.*) \|$", section, flags=re.MULTILINE)
    assert 0 < len(rows) <= MAX_FILES
    for path, what in rows:
        code = (ROOT / path).read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", what)[:1]:
            assert re.search(rf"\b(class|def) {name}\b", code), f"{path} defines no {name}"


SECURITY = (ROOT / "SECURITY.md").read_text(encoding="utf-8")

TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")

RULES = re.findall(r"^\| (.+?) \| `(tests/\S+)::(test_\w+)` \|$", SECURITY, re.MULTILINE)

KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.MobulaError) and kind is not errors.MobulaError
]


def defined(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}


def test_every_line_of_the_rules_has_a_test_that_is_there() -> None:
    table = SECURITY.partition("## Rules")[2].partition("## Exceptions")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| rule")]
    assert len(rows) == len(RULES) >= 15
    assert [rule for rule, path, name in RULES if name not in defined(path)] == []


def test_every_error_is_found_with_symptom_cause_and_command() -> None:
    for kind in (*KINDS, ConfigError):
        [row] = [line for line in TROUBLES.splitlines() if line.startswith(f"| `{kind.__name__}` |")]
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        assert len(cells) == 5 and all(cells), row
        assert re.fullmatch(r"`[^`]+`", cells[4]), f"the last column of {row} is a command"


def test_reasons_for_which_samples_are_skipped_are_found() -> None:
    reasons = {kind.reason for kind in errors.SkippedSample.__subclasses__()}
    assert len(reasons) >= 4 and all(f"`{reason}`" in TROUBLES for reason in reasons)


def test_every_message_is_on_the_page_of_messages_under_its_kind() -> None:
    assert error_messages.TARGET.read_text(encoding="utf-8") == error_messages.text(), (
        "run `python -m docs.generate.error_messages`"
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


MAX_CELL = 160  # characters, with the spaces between the bars


def long_cells(page: str) -> list[str]:
    rows = [line for line in page.splitlines() if line.startswith("|")]
    return [cell for row in rows for cell in row.split("|") if len(cell) > MAX_CELL]


def test_cells_of_tables_are_short() -> None:
    pages = [*DOCS, ROOT / "README.md"]
    found = {page.name: cells for page in pages if (cells := long_cells(page.read_text(encoding="utf-8")))}
    assert found == {}


def test_a_long_cell_is_seen() -> None:
    assert long_cells(f"| a | {'b' * 200} |\n{'c' * 200}") == [f" {'b' * 200} "]


def test_a_generated_cell_has_whole_sentences() -> None:
    first, second = "The first, e.g. `this` one.", f"The {'second ' * 20}one."
    assert shortened(first) == (first, "")
    assert shortened(f"{first} {second}") == (f"{first} (more below)", second)
    whole = f"One clause; {'another ' * 20}clause."
    assert shortened(whole) == ("One clause (more below)", whole)
    assert chunks(["a" * 100, "b" * 50, "c" * 100]) == [f"{'a' * 100}, {'b' * 50}", "c" * 100]


TOPS = ("configs", "cluster", "actors", "learner", "rewards", "deploy")

ROOMS = sorted({path.parent.relative_to(ROOT).as_posix() for top in TOPS for path in (ROOT / top).glob("*/*.py")})
ROOMS += ["cluster", "learner"]  # have modules of their own

SPAN = re.compile(r"`([^`\n]+)`")

NOUN = re.compile(r"`(\w+)`\s+\(`([\w/]+\.py)`\)")

PATH = re.compile(r"[\w./-]+(?:/|\.py)|(?:configs|docs|tests|cluster|actors|learner|rewards|deploy)/[\w./-]+")

NAME = re.compile(r"[A-Z][A-Za-z0-9_]+|[a-z]+(?:_[a-z]+)+")

KEY = re.compile(r"(?:data|environment|algorithm|learner|resources|sampler|metrics|rewards|policy)\.[a-z_]+")


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

KEYS = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "configuration").glob("*.md"))


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
    text = (ROOT / room / "README.md").read_text(encoding="utf-8")
    assert 8 <= len(text.splitlines()) <= 25
    assert text.startswith(f"# {room}\n")
    parts = ("Enters", "Leaves", "Nouns", "Read first", "One more")
    assert [part for part in parts if f"**{part}:**" not in text] == []
    assert NOUN.search(text), "it names no class or function with its module"
    assert missing(room, text) == []


def test_a_name_or_path_that_is_not_there_is_seen() -> None:
    text = (
        "`loop.py`, `cluster/nowhere/`, `NoSuchClass`, `data.nothing`, "
        "`Manifest` (`transport.py`), `Manifest` (`manifest.py`)"
    )
    assert missing("cluster/weight_sync", text) == [
        "loop.py", "cluster/nowhere/", "NoSuchClass", "data.nothing", "Manifest of transport.py",
    ]  # fmt: skip

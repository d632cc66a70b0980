"""Source, tests and documents are in plain technical English: words that docs/style.md excludes do not occur."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from sources import PACKAGES, ROOT

# The pattern of each excluded word, without regard to case, and what to write instead.
EXCLUDED = {
    r"whoever": "name the caller, worker or process",
    r"nobody": "no caller, no worker, not awaited",
    r"somebody": "name the caller, worker or process",
    r"anew": "again",
    r"befell|befalls?|befallen": "the failure, the error to raise",
    r"mend(s|ed|ing|er)?": "fix; regenerate, for lost groups",
    r"herald(s|ed|ing)?": "announce",
    r"crews?": "worker pool",
    r"fleets?": "rollout pool",
    r"desks?": "server",
    r"outbox(es)?": "message queue",
    r"correspondence": "client",
    r"told": "sent, reported, informed",
    r"news": "messages",
    r"as those see": "name the object and its users",
}
WORDS = re.compile(rf"(?<![A-Za-z])(?:{'|'.join(EXCLUDED)})(?![a-z])", re.IGNORECASE)
HISTORY = "docs/CHANGELOG.md"
LISTS_THEM = "docs/style.md"  # the list for readers
THIS_FILE = Path(__file__).relative_to(ROOT).as_posix()
TEXTS = {".py", ".md", ".yaml", ".sh", ".j2"}


def texts() -> Iterator[Path]:
    """Product code, tests, benchmarks, examples and documents; data files are left out."""
    for folder in (*PACKAGES, "benchmarks", "docs", "examples", "tests"):
        yield from (path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in TEXTS and path.is_file())
    yield ROOT / "README.md"


def excluded_words(name: str, text: str) -> list[str]:
    lines = enumerate(text.splitlines(), start=1)
    return [f"{name}:{number} {found[0]!r}" for number, line in lines for found in WORDS.finditer(line)]


def test_no_excluded_word_occurs() -> None:
    found = []
    for path in texts():
        name = path.relative_to(ROOT).as_posix()
        if name not in (HISTORY, LISTS_THEM, THIS_FILE):
            found += excluded_words(name, path.read_text(encoding="utf-8"))
    assert found == [], "see the list in tests/architecture/test_language.py for what to write instead"


@pytest.mark.parametrize(
    ("text", "num"),
    [
        ("Whoever asks", 1),
        ("self._crew = worker_crew", 2),
        ("what befell it, and nobody", 2),
        ("recommended amendments: a newer one", 0),
        ("class Fleet:", 1),
    ],
)
def test_an_excluded_word_is_seen(text: str, num: int) -> None:
    assert len(excluded_words("x", text)) == num


def test_the_style_guide_lists_what_is_excluded() -> None:
    guide = (ROOT / LISTS_THEM).read_text(encoding="utf-8")
    listed = (
        "whoever", "nobody", "somebody", "anew", "befell", "mend", "herald", "crew", "desk", "outbox", "told", "news",
    )  # fmt: skip
    assert [word for word in listed if f"`{word}`" not in guide] == []

"""Every link and every test that a page names exists; docs/README.md lists every page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
DOCS = sorted((REPOSITORY / "docs").glob("*.md"))
PAGES = [*sorted(REPOSITORY.glob("*.md")), *DOCS, REPOSITORY / "examples" / "README.md"]
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_the_index_has_every_page() -> None:
    linked = set(LINK.findall((REPOSITORY / "docs" / "README.md").read_text(encoding="utf-8")))
    assert {page.name for page in DOCS} - linked == {"README.md"}


def test_every_test_file_that_a_page_names_exists() -> None:
    names = {path.name for path in (REPOSITORY / "tests").rglob("test_*.py")}
    named = {name for page in PAGES for name in TEST_FILE.findall(page.read_text(encoding="utf-8"))}
    assert len(named) > 50 and named - names == set()


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(
        "# A heading\n[x](a.md#a-heading) [y](b.md) [z](#none) [w](https://example.org/b.md)"
    )
    assert broken_links(tmp_path / "a.md") == ["b.md", "#none"]

"""The walkthrough's path from a row to its gradient names files and classes that exist, and stays short."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
SECTION = "## From a row of the data file to its gradient"
MAX_FILES = 30


def test_the_path_of_a_row_is_what_the_walkthrough_says() -> None:
    text = (ROOT / "docs" / "walkthrough.md").read_text(encoding="utf-8")
    section = text.split(SECTION)[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+\.py)` \| (.*) \|$", section, flags=re.MULTILINE)
    assert 0 < len(rows) <= MAX_FILES
    for path, what in rows:
        code = (ROOT / path).read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", what)[:1]:
            assert re.search(rf"\b(class|def) {name}\b", code), f"{path} defines no {name}"

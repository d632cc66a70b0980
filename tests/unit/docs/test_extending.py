"""Every block of docs/extending.md applies to a copy of the packages, and what it adds works there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
PAGE = REPOSITORY / "docs" / "extending.md"
COPIED = ("actors", "cluster", "configs", "deploy", "docs", "learner", "rewards", "tests")
CHECKS = "tests/unit/docs/extending_checks.py"
FAMILY = "tests/unit/learner/test_families.py::test_the_policy_of_a_text_family_equals_its_plain_forward[olmo2]"
VISION_FAMILY = "tests/unit/learner/test_family_forward.py"
VISION_TESTS = (
    "ids_and_log_probs_equal_the_familys_own",
    "the_tower_runs_once_a_batch_and_every_parameter_gets_a_gradient",
)
OPTION = "tests/unit/configs/test_config.py::test_every_option_of_every_group_loads"
OPTIONS = ("resources=gpu_4", "sampler=timed", "learner=replicated", "rewards=brief_math")
BLOCK = re.compile(r"^```(python|yaml|diff)\n# (\S+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
SECTION = re.compile(r"^## (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of the page: a new file, or hunks for one that is there."""

    kind: str
    path: str
    content: str


def sections() -> dict[str, str]:
    """Title -> text, of every section of the page."""
    _, *parts = SECTION.split(PAGE.read_text(encoding="utf-8"))
    return dict(zip(parts[::2], parts[1::2], strict=True))


def blocks(text: str) -> list[Block]:
    return [Block(*found) for found in BLOCK.findall(text)]


def apply(block: Block, root: Path) -> None:
    """Write a new file, or replace the text of each hunk, which must occur exactly once."""
    path = root / block.path
    if block.kind != "diff":
        assert not path.exists(), f"{block.path} is there already"
        path.write_text(block.content, encoding="utf-8")
        return
    text = path.read_text(encoding="utf-8")
    for hunk in block.content.rstrip("\n").split("\n@@\n"):
        before = "\n".join(line[1:] for line in hunk.split("\n") if line[:1] != "+")
        after = "\n".join(line[1:] for line in hunk.split("\n") if line[:1] != "-")
        assert text.count(before) == 1, f"{block.path} has {text.count(before)} times:\n{before}"
        text = text.replace(before, after)
    path.write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository to which the whole page was applied."""
    root = tmp_path_factory.mktemp("extended")
    for folder in COPIED:
        shutil.copytree(REPOSITORY / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(REPOSITORY / file, root / file)
    for block in blocks(PAGE.read_text(encoding="utf-8")):
        apply(block, root)
    return root


def run(root: Path, *words: str, timeout_s: int) -> str:
    """Run a Python module in the copy; returns its output."""
    environment = os.environ | {
        "PYTHONPATH": str(root / "deploy" / "package"),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def test_every_section_adds_something_has_a_check_and_names_a_test_to_copy() -> None:
    checks = (REPOSITORY / CHECKS).read_text(encoding="utf-8")
    assert len(sections()) == 13
    for title, text in sections().items():
        assert blocks(text), title
        assert re.search(r"Tests? to copy", text), title
        name = title.lower().replace(" ", "_").removeprefix("a_").removeprefix("an_")
        assert f"def test_{name}" in checks, title


def test_every_fenced_block_is_applied() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert len(blocks(text)) == text.count("\n```") / 2


def test_every_path_that_the_page_names_is_there() -> None:
    text = PAGE.read_text(encoding="utf-8")
    new = {block.path for block in blocks(text)}
    named = set(re.findall(r"`((?:actors|cluster|configs|deploy|learner|rewards|tests)/[\w/.]+)`", text))
    assert [path for path in sorted(named - new) if not (REPOSITORY / path).exists()] == []


def test_a_hunk_that_fits_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("a = 1\na = 1\n")
    for content in (" b = 1\n+c = 1\n", "-a = 1\n+a = 2\n"):
        with pytest.raises(AssertionError, match="times"):
            apply(Block("diff", "x.py", content), tmp_path)


def test_added_files_are_formatted(extended: Path) -> None:
    added = [b.path for b in blocks(PAGE.read_text(encoding="utf-8")) if b.kind == "python"]
    run(extended, "ruff", "format", "--check", "--no-cache", *added, timeout_s=60)
    run(extended, "ruff", "check", "--no-cache", *added, timeout_s=60)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_the_page_adds_works(extended: Path) -> None:
    options = [f"{OPTION}[{option}]" for option in OPTIONS]
    vision = [f"{VISION_FAMILY}::test_{name}[llava]" for name in VISION_TESTS]
    words = ("-n", "0", "-q", "-p", "no:cacheprovider", CHECKS, FAMILY, *vision, *options)
    assert " passed" in run(extended, "pytest", *words, timeout_s=850)


@pytest.mark.slow
def test_the_generated_pages_take_the_new_entries(extended: Path) -> None:
    run(extended, "mobula.configs.document", timeout_s=120)
    run(extended, "mobula.deploy.tools.support_tables", timeout_s=240)
    documented = (extended / "docs" / "configuration.md").read_text()
    assert [key for key in ("algorithm.losses.topr.cap", "metrics.csv") if f"`{key}`" not in documented] == []
    supported = (extended / "docs" / "supported.md").read_text()
    entries = (
        "median",
        "topr",
        "absolute",
        "mis_geometric",
        "brevity",
        "olmo2",
        "llava",
        "csv",
        "timed",
        "replicated",
        "gpu_4",
    )
    assert [entry for entry in entries if f"`{entry}`" not in supported] == []

"""Names of a user's own code: what is found, with which options it is called, and what is said where it cannot be."""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mobula.cluster.user_code import FOLDER_VARIABLE, chosen, load, user_files

BUILT_IN = {"add": lambda a, b: a + b}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "siblings.py").write_text("SCALE = 10\n")
    (tmp_path / "own.py").write_text(
        "from siblings import SCALE\n\n"
        "PI = 3\n"
        "def scaled(a, b, *, by, shift=0): return (a + b) * by * SCALE + shift\n"
        "def one(a): return a\n"
        "class Pair:\n"
        "    def __init__(self, a, b): self.sum = a + b\n"
        "    @classmethod\n"
        "    def of(cls, a, b): return cls(a, b).sum\n"
    )
    (tmp_path / "broken.py").write_text("def helper():\n    return [][1]\n\nhelper()\n")
    (tmp_path / "unparsed.py").write_text("def f(:\n")
    (tmp_path / "lacking.py").write_text("import no_such_library\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def call(name: str, **options: object) -> object:
    return chosen(BUILT_IN, name, "sums.kind", ("a", "b"), options)(1, 2)


def test_a_name_is_a_built_in_one_or_the_users_module_or_file(own: Path) -> None:
    assert call("add") == 3
    assert call("own.py:scaled", by=2) == call("own:scaled", by=2) == call(f"{own}/own.py:scaled", by=2) == 60
    assert call("own.py:scaled", by=2, shift=1) == 61
    assert call("own.py:Pair").sum == call("own.py:Pair.of") == 3


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("add", {"by": 1}, "sums.kind_options has by, and sums.kind=add is not your own code: remove it"),
        ("onw.py:scaled", {}, r"no file .*/onw.py here .*near: own.py"),
        ("own.py:scald", {}, r"own.py has no scald \(did you mean 'scaled'\?\)"),
        ("no_such_module:f", {}, "there is no module 'no_such_module': put it on the PYTHONPATH"),
        ("own.py:PI", {}, r"it is a int: name what is called as \(a, b\)"),
        ("own.py:one", {}, r"it takes \(a\), and is called with \(a, b\) and options by keyword"),
        ("own.py:scaled", {}, r"needs sums\.kind_options\.by, which is not set"),
        ("own.py:scaled", {"shft": 2}, r"has no option 'shft' \(did you mean 'shift'\?\): it has by, shift"),
        ("broken.py:helper", {}, r"IndexError: list index out of range, in .*broken.py:2: `return \[\]\[1\]`"),
        ("unparsed.py:f", {}, r"SyntaxError: .*unparsed.py, line 1"),
        ("lacking.py:f", {}, r"No module named 'no_such_library', in .*lacking.py:1: `import no_such_library`"),
    ],
)
def test_code_that_cannot_be_called_is_refused(name: str, options: dict[str, object], message: str, own: Path) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        call(name, **options)
    assert re.match(r"sums\.kind(_options|=)", str(raised.value))


def test_a_module_that_failed_is_imported_again_after_its_repair(own: Path) -> None:
    with pytest.raises(ValueError, match="IndexError"):
        load("broken.py:helper")
    (own / "broken.py").write_text("helper = 5\n# longer than before\n")
    assert load("broken.py:helper") == 5


def test_threads_that_load_a_file_at_once_have_all_of_it(own: Path) -> None:
    (own / "slow.py").write_text("import time\ntime.sleep(0.2)\nvalue = 7\n")
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(load, ["slow.py:value"] * 4)) == [7] * 4


def test_a_relative_path_begins_in_the_folder_of_the_command(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = own / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    with pytest.raises(ValueError, match="no file"):
        load("own.py:one")
    monkeypatch.setenv(FOLDER_VARIABLE, str(own))
    assert load("own.py:one")(4) == 4


def test_examples_are_found_anywhere_and_are_no_files_of_the_user(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(own)
    assert load("examples/sums/sums.py:write_sums")(own / "sums") == own / "sums"
    assert user_files({"writer": "examples/sums/sums.py:write_sums", "loss": "own.py:one"}) == ["own.py"]


def test_a_users_file_hides_no_installed_module(own: Path) -> None:
    (own / "json.py").write_text("mine = True\n")
    assert load("json.py:mine") and not hasattr(sys.modules["json"], "mine")


def test_files_are_found_wherever_a_configuration_names_them() -> None:
    values = {"a": {"loss": "losses.py:topr"}, "b": [{"function": "x/y.py:f"}, "module:f"], "url": "http://h:80/a.py"}
    assert user_files(values) == ["losses.py", "x/y.py"]

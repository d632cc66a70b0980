"""Whatever a run starts carries its mark; where its cluster is stands in its folder for as long as it goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mobula.deploy.host.processes import ProcessId
from mobula.deploy.host.run_record import (
    DRIVER_VARIABLE,
    RECORD_FILE,
    RUN_VARIABLE,
    SESSION_FILE,
    RunMark,
    RunRecord,
    marking,
    recorded,
)


def record(tmp_path: Path, *, is_private: bool = True) -> RunRecord:
    (tmp_path / "digits").mkdir()
    (tmp_path / "session").mkdir()
    mark = RunMark("digits/0123", ProcessId("here", 12, 34))
    folder = tmp_path / "session" if is_private else None
    return RunRecord("digits", tmp_path / "digits", mark, "10.0.0.1:6379", "digits", folder)


def test_children_carry_the_mark_and_it_ends_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_VARIABLE, "an outer run's")
    monkeypatch.delenv(DRIVER_VARIABLE, raising=False)
    with marking("digits") as mark:
        names = (RUN_VARIABLE, DRIVER_VARIABLE)
        program = f"import os; print(*(os.environ[name] for name in {names}))"
        child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert RunMark.of(dict(zip(names, child.stdout.split(), strict=True))) == mark
    assert mark.run_id.startswith("digits/") and mark.driver == ProcessId.of(os.getpid())
    assert os.environ[RUN_VARIABLE] == "an outer run's" and DRIVER_VARIABLE not in os.environ


def test_two_runs_of_one_name_differ() -> None:
    with marking("digits") as first, marking("digits") as second:
        assert first != second


@pytest.mark.parametrize("is_private", [True, False])
def test_the_record_lies_in_the_run_folder_while_the_run_goes_on(tmp_path: Path, is_private: bool) -> None:
    written = record(tmp_path, is_private=is_private)
    with pytest.raises(KeyError), recorded(written):
        assert RunRecord.read(tmp_path / "digits" / RECORD_FILE) == written
        assert (tmp_path / "session" / SESSION_FILE).exists() == is_private
        raise KeyError("the run failed")
    assert list((tmp_path / "digits").iterdir()) == list((tmp_path / "session").iterdir()) == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"run": "digits", "session_folder": null}'])
def test_what_is_no_record_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / RECORD_FILE).write_text(text)
    with pytest.raises(ValueError, match="cluster.json is no record of a run"):
        RunRecord.read(tmp_path / RECORD_FILE)

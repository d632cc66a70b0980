"""`mobula audit`: its lines, its JSON and its exit codes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from runs import whole_run
from typer.testing import CliRunner

from mobula.deploy.cli.commands import app
from mobula.deploy.host.terminal import PlainConsole
from mobula.deploy.report.audit import audit


def shown(folder: Path, *, is_json: bool = False, head: str = "") -> tuple[int, str]:
    text = io.StringIO()
    code = audit(None, folder, PlainConsole(file=text, width=200, soft_wrap=True), head=head, is_json=is_json)
    return code, text.getvalue()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whole_run(tmp_path_factory.mktemp("audited") / "run")


def test_a_run_without_a_fault_is_shown_with_its_figures(run: Path) -> None:
    code, text = shown(run)
    assert code == 0
    lines = {line[:12].strip(): line[12:].strip() for line in text.splitlines()}
    assert lines["part 2"].startswith("resumed from the checkpoint of version 2; done")
    assert lines["trained"] == "4 steps of 8 groups"
    assert lines["staleness"].endswith("mean 0.000, max 0 of 0 allowed")
    assert lines["rollout/0"] == "checksum+canary 6"
    assert lines["checkpoint"].endswith("of part 2: steps 3 to 4 after version 2")
    assert "nothing is missing, altered or out of order" in text


def test_every_figure_is_in_the_json(run: Path) -> None:
    code, text = shown(run, is_json=True)
    found = json.loads(text)
    assert (code, found["findings"], found["num_groups"], found["num_pushes"]) == (0, [], 8, 6)
    assert found["checkpoints"]["4"]["steps"] == [3, 4]


def test_a_finding_is_an_exit_code_of_1(run: Path) -> None:
    code, text = shown(run, head="0" * 64)
    assert code == 1
    assert "no record has the sha256 0000" in text


def test_a_folder_that_is_no_run_is_an_exit_code_of_2(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["audit", "--run", str(tmp_path / "none")]).exit_code == 2
    assert CliRunner().invoke(app, ["audit", "--run", str(tmp_path)]).exit_code == 2

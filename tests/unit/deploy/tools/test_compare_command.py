"""`mobula compare` on folders of runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from metrics_data import write_run
from typer.testing import CliRunner

from mobula.deploy.cli import app


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("compared")
    for seed in (1, 2):
        write_run(folder / f"seed{seed}", num_steps=6, seed=seed)
    return [folder / "seed1", folder / "seed2"]


def test_seeds_of_one_setting_are_one_line_of_the_page_and_of_the_table(runs: list[Path], tmp_path: Path) -> None:
    page, table = tmp_path / "page.html", tmp_path / "table.json"
    words = ["compare", f"grpo={runs[0]},{runs[1]}", str(runs[0]), "--output", str(page), "--json", str(table)]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    assert [(row["label"], row["num_runs"]) for row in json.loads(table.read_text())] == [("grpo", 2), ("seed1", 1)]
    assert "grpo" in page.read_text() and str(page) in found.output.replace("\n", "")


@pytest.mark.parametrize(
    ("word", "message"),
    [("nowhere", "there is no run in nowhere"), ("grpo=", "names no run: give [LABEL=]RUN[,RUN...]")],
)
def test_a_run_that_is_not_there_is_named(word: str, message: str) -> None:
    found = CliRunner().invoke(app, ["compare", word])
    assert found.exit_code == 2
    assert message in " ".join(found.output.split())

"""The table of recipes grows by one run at a time and goes on where it was stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import recipes
from benchmarks.recipes import Result, main


class Trainer:
    """Stands for `mobula train`; it fails at the run that `fails` names."""

    def __init__(self, fails: tuple[str, int] | None = None) -> None:
        self.runs: list[tuple[str, int]] = []
        self.fails = fails

    def __call__(self, name: str, seed: int, folder: Path, words: list[str]) -> Result:
        if (name, seed) == self.fails:
            raise KeyboardInterrupt
        self.runs.append((name, seed))
        return Result(name, seed, 0.5, 0.9 - 0.06 * seed, 200, 60.0, "2026-01-01", 2, tuple(words))


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    trainer = Trainer()
    monkeypatch.setattr(recipes, "_measured", trainer)
    return trainer


def go(tmp_path: Path, seeds: int = 2, runs: int = 1_000, names: tuple[str, ...] = ("grpo", "ppo_gae")) -> None:
    main([], list(names), seeds, tmp_path / "runs", runs, tmp_path / "recipes.json")


def test_seed_0_of_every_recipe_comes_first_and_no_run_is_measured_twice(tmp_path: Path, trainer: Trainer) -> None:
    go(tmp_path, seeds=1)
    go(tmp_path)
    assert trainer.runs == [("grpo", 0), ("ppo_gae", 0), ("grpo", 1), ("ppo_gae", 1)]
    go(tmp_path)
    assert len(trainer.runs) == 4


def test_a_stopped_command_keeps_what_was_done(tmp_path: Path, trainer: Trainer) -> None:
    trainer.fails = ("ppo_gae", 0)
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path)
    assert [row["recipe"] for row in json.loads((tmp_path / "recipes.json").read_text())] == ["grpo"]
    trainer.fails = None
    go(tmp_path, seeds=1)
    assert trainer.runs == [("grpo", 0), ("ppo_gae", 0)]


def test_one_run_a_command(tmp_path: Path, trainer: Trainer) -> None:
    go(tmp_path, runs=1)
    assert trainer.runs == [("grpo", 0)]
    go(tmp_path, runs=0)
    assert trainer.runs == [("grpo", 0)]


def test_the_table_has_means_and_says_which_recipe_missed_its_target(tmp_path: Path, trainer: Trainer) -> None:
    go(tmp_path)
    lines = (tmp_path / "runs" / "table.md").read_text().splitlines()
    assert lines[2] == "| `grpo` | 2 | 0.500 | 0.870 | 0.900 0.840 | 0.85 | no |"
    assert lines[3] == "| `ppo_gae` | 2 | 0.500 | 0.870 | 0.900 0.840 | 0.8 | yes |"

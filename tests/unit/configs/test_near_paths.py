"""A mistyped path names what exists near it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mobula.configs.near_paths import may_be_hub_name, near


def test_the_first_missing_part_and_similar_names_are_shown(tmp_path: Path) -> None:
    (tmp_path / "models" / "SmolLM2-135M").mkdir(parents=True)
    (tmp_path / "runs").mkdir()
    (tmp_path / "models" / "train.json").write_text("")
    models = tmp_path / "models"
    assert near(tmp_path / "modles" / "SmolLM2-135M") == f" ({tmp_path} has no modles; near: {models})"
    assert near(models / "smollm2-135m") == f" ({models} has no smollm2-135m; near: {models / 'SmolLM2-135M'})"
    assert near(models / "train.jsonl") == f" ({models} has no train.jsonl; near: {models / 'train.json'})"
    assert near(models / "other") == f" ({models} has no other)"
    assert near(models / "train.json" / "x") == f" ({models / 'train.json'} is a file)"
    assert near(models) == ""


def test_a_relative_path_names_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    assert near(Path("date/x")) == f" ({tmp_path} has no date; near: data)"


@pytest.mark.parametrize(
    ("name", "may_be"),
    [
        ("gpt2", True),
        ("Qwen/Qwen2.5-VL-3B-Instruct", True),
        ("/models/qwen", False),
        ("./models", False),
        ("a/b/c", False),
        ("no name", False),
        ("~/models", False),
        ("models/", False),
    ],
)
def test_names_of_the_hub_have_one_slash_at_most(name: str, may_be: bool) -> None:
    assert may_be_hub_name(name) is may_be

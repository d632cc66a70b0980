"""Pairs of answers on handwritten digits: rows that all offline jobs read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mobula.actors.datasets.conversations import read_conversations
from mobula.configs.errors import ConfigError
from mobula.configs.load import load_config
from mobula.deploy.wiring.preparation import ensure_data
from mobula.examples.digits.digits import write_digits


@pytest.mark.parametrize(
    ("task", "asked_in", "num_images", "largest"),
    [("digit_pairs", "digits", 1, 9), ("digit_sum_pairs", "digit_sum", 2, 18)],
)
def test_each_question_has_a_right_and_a_wrong_answer(
    tmp_path: Path, task: str, asked_in: str, num_images: int, largest: int
) -> None:
    folder = write_digits(tmp_path / task, task=task)  # type: ignore[arg-type]
    questions = write_digits(tmp_path / "questions", task=asked_in)  # type: ignore[arg-type]
    for split in ("train", "validation", "test"):
        rows = [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]
        asked = [json.loads(line) for line in (questions / f"{split}.jsonl").read_text().splitlines()]
        assert [row["chosen"] for row in rows] == [row["solution"] for row in asked]
        wrong = [int(row["rejected"].removeprefix(r"\boxed{").removesuffix("}")) for row in rows]
        assert all(row["rejected"] != row["chosen"] for row in rows)
        assert set(wrong) <= set(range(largest + 1)) and len(set(wrong)) > largest / 2
        pairs = read_conversations(folder, split, "pair")
        assert len(pairs.rows) == len(rows) and not pairs.skipped
        assert {len(row.images) for row in pairs.rows} == {num_images}
        assert not read_conversations(folder, split, "conversation").skipped


@pytest.mark.parametrize("job", ["sft", "reward_model", "dpo"])
@pytest.mark.parametrize("data", ["digit_pairs", "digit_sum_pairs"])
def test_offline_jobs_have_a_preset_for_two_cores(tmp_path: Path, job: str, data: str) -> None:
    config = load_config([f"experiment={job}_digits", f"data={data}", f"data.path={tmp_path / 'data'}"])
    assert (config.offline.job, config.resources.device) == (job, "cpu")
    ensure_data(config)
    assert read_conversations(config.data.path, config.evaluation.split, config.offline.rows).rows


def test_a_margin_without_pairs_is_refused() -> None:
    words = ["experiment=reward_model_digits", "offline.reward_model.loss=regression"]
    with pytest.raises(ConfigError, match="offline.reward_model.margin=0.1.*offline.reward_model.loss=bradley_terry"):
        load_config([*words, "offline.reward_model.margin=0.1"])

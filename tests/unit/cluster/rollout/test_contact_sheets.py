"""Images of evaluations on one sheet, its hash, gains of pairs, and both in report and tables."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fakes import SETTINGS, FakeRollouts, make_prompt
from metrics_data import write_run
from PIL import Image

from mobula.cluster.metrics.evaluation_statistics import paired_gains
from mobula.cluster.metrics.report.report import write_report
from mobula.cluster.metrics.step_records import HELD_OUT, EvaluationRecord, to_line
from mobula.cluster.records.trajectory import Answers, Generated, Prompt, Response, Reward, TrajectoryGroup
from mobula.cluster.rollout.contact_sheets import ContactSheets
from mobula.cluster.rollout.evaluation import EvaluationSchedule, Evaluator, ScoredPrompt, Suite


def png(level: int, size: tuple[int, int] = (16, 16)) -> bytes:
    file = io.BytesIO()
    Image.new("L", size, level).save(file, "PNG")
    return file.getvalue()


def scored(number: int, *levels: int) -> ScoredPrompt:
    prompt: Prompt = make_prompt(f"test/{number}/s{number}")
    answers = Answers(prompt, tuple(range(len(levels))), tuple(Response("", 1, False, (png(n),)) for n in levels))
    return ScoredPrompt(prompt, [Reward(1.0)] * len(levels), Generated(None, None, answers))


async def test_a_sheet_has_all_images_and_the_report_shows_it_with_its_hash(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_run(folder, num_steps=4)
    sheets = ContactSheets(folder / "evaluations", timeout_s=1)
    for version, level in ((0, 10), (2, 100), (4, 200)):
        await sheets.write(HELD_OUT, version, [scored(n, level, level + n) for n in range(7)])
    sheet = folder / "evaluations" / "held_out-4.png"
    pixels = np.asarray(Image.open(sheet).convert("L"))
    assert pixels.shape == (2 * 34 + 2, 12 * 34 + 2), "six prompts of two images in a row, each 32 pixels wide"
    assert (pixels[10, 10], pixels[10, 44], pixels[50, 10], pixels[50, 44]) == (200, 200, 200, 206)
    text = write_report(folder).read_text(encoding="utf-8")
    digest = hashlib.sha256(sheet.read_bytes()).hexdigest()
    assert digest in text and "Images before and after" in text
    rows = json.loads((folder / "evaluations" / "sheets.json").read_text())
    assert [row["version"] for row in rows] == [0, 2, 4] and rows[2]["sha256"] == digest
    assert rows[1]["sha256"] not in text, "the first and the last are shown"
    sheet.write_bytes(png(0))
    with pytest.raises(ValueError, match="put the file of the run back"):
        write_report(folder)


async def test_an_excluded_prompt_has_no_images_and_no_images_no_sheet(tmp_path: Path) -> None:
    await ContactSheets(tmp_path, timeout_s=1).write(HELD_OUT, 0, [ScoredPrompt(make_prompt("a/0/b"), [None])])
    assert not list(tmp_path.iterdir())


def test_tables_have_a_row_for_each_step_and_each_evaluation(tmp_path: Path) -> None:
    write_run(tmp_path, num_steps=3)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(to_line(EvaluationRecord(3, 0.5, 0.4, 0.6, 8, "other", {"ocr_gain": 0.25})) + "\n")
    write_report(tmp_path)
    steps = list(csv.DictReader((tmp_path / "metrics.csv").open()))
    assert [row["step"] for row in steps] == ["1", "2", "3"] and float(steps[0]["total_s"]) > 0
    assert any(name.startswith("r_") for name in steps[0])
    evaluations = list(csv.DictReader((tmp_path / "eval_metrics.csv").open()))
    assert evaluations[-1]["suite"] == "other" and evaluations[-1]["ocr_gain"] == "0.25"
    assert evaluations[0]["ocr_gain"] == ""


class Drifting:
    """Prompt i has i / 10, which grows by 0.2 with each version; the judge says half of that."""

    def __init__(self, rollouts: FakeRollouts) -> None:
        self._rollouts = rollouts

    async def score(self, group: TrajectoryGroup, group_id: str) -> list[Reward]:
        value = int(group_id.split("/")[1]) / 10 + 0.2 * self._rollouts.version
        return [Reward(value, {"ocr": value + d, "judge": value / 2}) for d in (-0.1, 0.1)]


async def test_gains_are_of_pairs_since_the_first_evaluation() -> None:
    rollouts = FakeRollouts()
    settings = replace(SETTINGS, temperature=1.0, num_samples=2)
    evaluator = Evaluator(
        suites=[Suite(HELD_OUT, [make_prompt(f"test/{i}/s{i}") for i in range(5)], settings)],
        rollouts=rollouts,
        rewards=Drifting(rollouts),
        accuracy_component="ocr",
        correct_from=1.0,
        max_concurrent=3,
        schedule=EvaluationSchedule(0, total_steps=2),
        on_result=lambda result: None,
    )
    [first] = await evaluator.run(0)
    assert "ocr_gain" not in first.values
    assert first.values["ocr_mean"] == pytest.approx(0.2)
    assert first.values["ocr_se"] == pytest.approx(np.std([0, 0.1, 0.2, 0.3, 0.4], ddof=1) / np.sqrt(5))
    rollouts.version = 1
    [second] = await evaluator.run(1)
    assert second.values["ocr_gain"] == pytest.approx(0.2)
    assert second.values["ocr_gain_se"] == pytest.approx(0, abs=1e-9), "every prompt gains as much"
    assert second.values["judge_gain"] == pytest.approx(0.1)
    again = Evaluator(
        suites=[],
        rollouts=rollouts,
        rewards=Drifting(rollouts),
        accuracy_component="ocr",
        correct_from=1.0,
        max_concurrent=1,
        schedule=EvaluationSchedule(0, total_steps=2),
        on_result=lambda result: None,
    )
    again.restore(1, json.loads(json.dumps(evaluator.state())))
    assert again.results == evaluator.results


def test_a_component_that_a_prompt_lacks_has_no_gain() -> None:
    after = {"a": {"x": 1.0, "y": 1.0}, "b": {"x": 3.0}}
    found = paired_gains({"a": {"x": 0.0}}, after)
    assert found == {"x_mean": 2.0, "x_se": 1.0, "x_gain": 1.0, "x_gain_se": 0.0}
    assert paired_gains({}, {}) == {}

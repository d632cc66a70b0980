"""A policy whose questions tell the answer gains without the image too, and is found; one that looks is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs import BARE, Job

from mobula.cluster.metrics.report.run_folder import RunVerdict
from mobula.cluster.metrics.summary import Summary
from mobula.deploy.api import diagnose
from mobula.examples.digits.digits import write_digits

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.timeout(1200)]

WORDS = (
    "experiment=digits", "resources=laptop", "data=jsonl", "data.prompt_suffix=''", "num_steps=40",
    "rewards=math_answer", "evaluation.controls=[blank_image,swapped_image,no_image]",
)  # fmt: skip


def answered(folder: Path) -> Path:
    """Digits whose questions say the answer, with the image of another row: it is not needed, and tells nothing."""
    write_digits(folder, task="digits")
    for split in ("train", "validation", "test"):
        path = folder / f"{split}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        images = [row["image"] for row in rows[1:] + rows[:1]]
        rows = [
            row | {"question": f"<image>It is {row['answer']}. Which digit?", "image": image}
            for row, image in zip(rows, images, strict=True)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_gain_that_needs_no_image_is_found(is_answered: bool, tmp_path: Path) -> None:
    data = answered(tmp_path / "data") if is_answered else write_digits(tmp_path / "data", task="digits")
    words = (*WORDS, f"data.path={data}", "warm_start.target_accuracy=0.4")
    with Job(tmp_path, words, small=BARE) as job:
        summary: Summary | None = job.trained(40).summary
    assert summary is not None and summary.accuracy_after > summary.accuracy_before + 0.1
    found = {finding.name: finding for finding in diagnose(job.run_folder)}["gain_without_media"]
    best = summary.controls[0]
    if is_answered:
        assert found.verdict is RunVerdict.WARNING and "of the gain is there without the image" in found.measured
        assert best.low < 0.05
    else:
        assert found.verdict in (RunVerdict.OK, RunVerdict.NOTICE)
        assert best.low > 0.2

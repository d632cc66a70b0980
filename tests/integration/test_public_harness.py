"""`mobula lmms-eval` runs the real harness, offline, on a tiny random Qwen2.5-VL and a task of local images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_rows import encoded
from PIL import Image
from typer.testing import CliRunner

from mobula.deploy.checks.lmms_eval import ENVIRONMENT
from mobula.deploy.cli import app
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

PINS = Path(__file__).parents[2] / "deploy" / "lmms_eval.txt"
REDS = (0, 51, 102, 255)  # of the images; their mean is what the task's second metric must give

TASK = """
task: mobula_colours
dataset_path: parquet
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: generate_until
doc_to_visual: !function colours.images
doc_to_text: question
doc_to_target: answer
process_results: !function colours.scores
generation_kwargs:
  max_new_tokens: 4
  temperature: 0
  do_sample: false
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
  - metric: red
    aggregation: mean
    higher_is_better: true
"""
FUNCTIONS = """
import io
from PIL import Image


def images(doc):
    return [Image.open(io.BytesIO(doc["image"])).convert("RGB")]


def scores(doc, results):
    red = images(doc)[0].getpixel((0, 0))[0]
    return {"exact_match": float(results[0].strip() == doc["answer"]), "red": red / 255}
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (ENVIRONMENT / "bin" / "python").exists(), reason="the harness has no environment here: `make harness`"
    ),
]


def write_task(folder: Path) -> Path:
    """A task of four images of one colour each."""
    images = {red: encoded(Image.new("RGB", (56, 56), (red, 20, 30))) for red in REDS}
    rows = [{"question": "Which colour is it?", "answer": f"red {red}", "image": images[red]} for red in REDS]
    tasks = folder / "tasks"
    tasks.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), folder / "images.parquet")
    (tasks / "colours.yaml").write_text(TASK.format(data=folder / "images.parquet"))
    (tasks / "colours.py").write_text(FUNCTIONS)
    return tasks


def run(folder: Path, *more: str) -> dict[str, Any]:
    words = ["lmms-eval", "--output", str(folder / "runs"), "--cache", str(folder / "cache"), "--device", "cpu"]
    pixels = ["--model-args", "min_pixels=784,max_pixels=3136"]  # the harness's smallest image is otherwise 448 x 448
    done = CliRunner().invoke(app, [*words, *pixels, "--timeout", "500", *more])
    assert done.exit_code == 0, done.output
    (path,) = (folder / "runs").glob("*/lmms-eval.json")
    artifact = json.loads(path.read_text())
    return {**artifact, "folder": path.parent}


def test_the_real_harness_scores_a_local_model_on_local_images_without_a_hub(tmp_path: Path) -> None:
    tasks = write_task(tmp_path)
    model = write_tiny_qwen2_5_vl(tmp_path / "model", seed=0)
    artifact = run(tmp_path, "--model", str(model), "--tasks", "mobula_colours", "--include-path", str(tasks))
    (task,) = artifact["tasks"]
    assert (task["task"], task["primary_metric"], task["num_samples"]) == ("mobula_colours", "exact_match", 4)
    assert task["metrics"] == {"exact_match": 0.0, "red": pytest.approx(sum(REDS) / len(REDS) / 255)}
    assert artifact["mean_primary_score"] == 0.0
    assert task["num_failed_requests"] == 0
    assert 1 <= task["mean_output_tokens"] <= 4
    samples = [json.loads(line) for line in (artifact["folder"] / task["samples_file"]).read_text().splitlines()]
    assert [sample["target"] for sample in samples] == [f"red {red}" for red in REDS]
    assert f"lmms-eval=={artifact['versions']['lmms-eval']}\n" in PINS.read_text()
    assert 0 < artifact["harness_seconds"] < artifact["seconds"]
    assert (tmp_path / "cache").is_dir()

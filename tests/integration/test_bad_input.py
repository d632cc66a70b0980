"""Whatever is wrong with the input: one clear message before training, or the sample is skipped and named."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from mobula.actors.datasets.rows import count_by_reason
from mobula.configs.load import load_config
from mobula.configs.overrides import overridden
from mobula.deploy.cli import app
from mobula.deploy.wiring.preparation import TRAIN, Prepared, prepare, write_skipped
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

Row = dict[str, Any]
NUM_GOOD = 20
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("bad") / "model")


def write_data(folder: Path, *extra: Row | str) -> Path:
    """A folder of good rows, and `extra` ones (or lines as they are) in the train split."""
    folder.mkdir(parents=True, exist_ok=True)
    Image.new("L", (56, 56), 128).save(folder / "good.png")
    good = [
        {"id": f"good-{n}", "question": "<image>Which digit is this?", "answer": str(n % 10), "image": "good.png"}
        for n in range(NUM_GOOD)
    ]
    for split in ("train", "validation", "test"):
        rows = [*good, *extra] if split == TRAIN else good
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def overrides(model: Path, data: Path, runs: Path) -> list[str]:
    words = [
        "experiment=digits", "data=jsonl", f"data.path={data}", f"policy.model={model}", f"folder={runs}", "name=bad",
    ]  # fmt: skip
    return [*words, "data.max_prompt_tokens=128", "sampler.max_tokens=8", "metrics.progress=false"]


def prepared(model: Path, data: Path, runs: Path, *more: str) -> Prepared:
    return prepare(load_config(overridden(overrides(model, data, runs), more)), lambda media: media)


def image(folder: Path, content: bytes) -> Row:
    """A row whose image is a file with this content."""
    (folder / "bad.png").write_bytes(content)
    return named("bad.png")


def named(image: Any, question: str = "<image>Which digit is this?") -> Row:
    return {"id": "the-bad-one", "question": question, "answer": "7", "image": image}


SKIPPED: dict[str, tuple[str, Callable[[Path], Row | str]]] = {
    "missing file": ("missing_file", lambda folder: named("nowhere.png")),
    "corrupt header": ("bad_media", lambda folder: image(folder, PNG + b"\0" * 30)),
    "path that leaves": ("outside_folder", lambda folder: named("../outside.png")),
    "no answer": ("missing_answer", lambda folder: {"id": "the-bad-one", "question": "Which digit?"}),
    "no question": ("missing_question", lambda folder: {"id": "the-bad-one", "answer": "7"}),
    "prompt too long": ("bad_prompt", lambda folder: named("good.png", "<image>" + "again and " * 200)),
    "too many images": ("bad_prompt", lambda folder: named(["good.png"] * 3, "<image>" * 3)),
    "fewer placeholders": ("placeholder_mismatch", lambda folder: named(["good.png"] * 2)),
    "broken JSON": ("broken_json", lambda folder: '{"id": "the-bad-one", "question": "<image>Wh'),
    "id twice": ("duplicate_id", lambda folder: named("good.png") | {"id": "good-3"}),
}


@pytest.mark.parametrize("case", SKIPPED)
def test_a_bad_sample_is_skipped_counted_and_named(model: Path, tmp_path: Path, case: str) -> None:
    reason, bad = SKIPPED[case]
    data = write_data(tmp_path / "data")
    run = prepared(model, write_data(data, bad(data)), tmp_path / "runs")
    assert len(run.splits[TRAIN].rows) == NUM_GOOD
    assert count_by_reason(run.skipped) == {reason: 1}
    write_skipped(tmp_path, run.skipped)
    [row] = json.loads((tmp_path / "skipped.json").read_text())
    assert row["reason"] == reason
    assert "the-bad-one" in row["sample_id"] or f"train.jsonl:{NUM_GOOD + 1}" in row["sample_id"]
    assert len(row["message"]) > 10


def test_an_image_that_is_damaged_behind_its_header_is_skipped_when_it_is_met(model: Path, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data")
    whole = (data / "good.png").read_bytes()
    run = prepared(model, write_data(data, image(data, whole[: len(whole) // 2])), tmp_path / "runs")
    assert run.skipped == [], "headers alone are read beforehand"
    source = run.source()
    served = {source.next().sample_id for _ in range(3 * NUM_GOOD)}
    assert served == {f"good-{n}" for n in range(NUM_GOOD)}
    [skipped] = source.skipped
    assert (skipped.sample, skipped.reason) == ("the-bad-one", "bad_media")
    assert "bad.png is corrupt" in skipped.detail


def test_more_bad_samples_are_allowed_by_a_key(model: Path, tmp_path: Path) -> None:
    data = with_lost_images(tmp_path / "data")
    run = prepared(model, data, tmp_path / "runs", "data.max_skipped_fraction=0.2")
    assert count_by_reason(run.skipped) == {"missing_file": 5}


def train(*words: str) -> Result:
    return CliRunner().invoke(app, ["train", *words])


def refused(result: Result) -> str:
    """The one message of a run that the user has to fix."""
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert result.stderr.count("mobula:") == 1
    return result.stderr


def with_file(name: str, content: str | None) -> Callable[[Path], Path]:
    """Writes good data, of which one file has this content or is not there."""

    def write(folder: Path) -> Path:
        file = write_data(folder) / name
        file.unlink() if content is None else file.write_text(content)
        return folder

    return write


def with_lost_images(folder: Path) -> Path:
    return write_data(folder, *(named(f"nowhere-{n}.png") | {"id": f"lost-{n}"} for n in range(5)))


emptied = with_file("train.jsonl", "\n\n")


REFUSED: dict[str, tuple[Callable[[Path], Path], list[str], list[str]]] = {  # data, words, what the message says
    "empty data set": (emptied, [], ["train.jsonl has no usable row"]),
    "no row with an answer": (
        with_file("train.jsonl", '{"question": "Which digit?"}\n' * 3), [], ["the row has no `answer`: add it"],
    ),
    "no test split": (
        with_file("test.jsonl", None), ["data.validation_fraction=0"], ["test.jsonl does not exist: set data.path"],
    ),
    "no folder": (lambda folder: folder / "nowhere", [], ["train.jsonl does not exist: set data.path"]),
    "too many bad rows": (
        with_lost_images, [],
        [
            "5 of 25 samples of the split train are unusable: missing_file 5 (",
            *(f"(lost-{n}): there is no file" for n in range(3)), "data.max_skipped_fraction is 0.1: fix",
        ],
    ),
    "a run folder that cannot be written": (
        write_data, ["folder={here}/file/runs"],
        ["runs/bad cannot be written", "set folder or name to another"],
    ),
    "more workers than the machine holds": (
        write_data, ["resources.rollout.num_workers=4000"],
        ["resources.rollout asks for 4000 workers", "lower resources.rollout.num_workers"],
    ),
    "a model folder without a model": (
        write_data, ["policy.model={here}/empty", "policy.tiny=none"],
        ["is no checkpoint folder (it has no config.json)"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_run_can_use_is_refused_at_once(model: Path, tmp_path: Path, restored_logging: None, case: str) -> None:
    make, more, messages = REFUSED[case]
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("a file is no folder, not even for root")
    words = overrides(model, make(tmp_path / "data"), tmp_path / "runs")
    found = refused(train(*overridden(words, [word.format(here=tmp_path) for word in more])))
    assert all(message in found for message in messages)
    assert not (tmp_path / "runs").exists(), "neither a run folder nor a link to it"


def test_a_refused_resume_leaves_the_run_as_it_was(model: Path, tmp_path: Path, restored_logging: None) -> None:
    runs, earlier = tmp_path / "runs", tmp_path / "runs" / "bad"
    earlier.mkdir(parents=True)
    files = ("run.log", "skipped.json", "config.yaml")
    for name in files:
        (earlier / name).write_text("mine")
    (runs / "latest").symlink_to("other")
    words = [*overrides(model, emptied(tmp_path / "data"), runs), "resume=auto"]
    assert "no usable row" in refused(train(*words))
    assert {path.name: path.read_text() for path in earlier.iterdir()} == dict.fromkeys(files, "mine")
    assert os.readlink(runs / "latest") == "other"


def test_a_finished_run_is_not_overwritten(model: Path, tmp_path: Path, restored_logging: None) -> None:
    """Work that is done stays: the folder of a run with a checkpoint is refused, untouched."""
    step = tmp_path / "runs" / "bad" / "checkpoints" / "step-000005"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text('{"files": {}}')
    message = refused(train(*overrides(model, write_data(tmp_path / "data"), tmp_path / "runs")))
    assert "already holds step 5" in message
    assert "resume=auto" in message
    assert sorted(path.name for path in (tmp_path / "runs").rglob("*")) == sorted(
        ["bad", "checkpoints", "step-000005", "manifest.json"]
    )

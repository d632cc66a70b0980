"""Offline jobs from end to end in one process: the digits as conversations and pairs, on the tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from offline_data import conversation, form_pair, pair, scored, write_rows
from offline_run import OfflineRun, offline_config

from cluster.metrics.report.run_folder import read_run_folder
from cluster.metrics.sinks.jsonl import read_records
from cluster.metrics.step_records import StepRecord
from learner.policies.tiny import write_tiny_qwen2_5_vl

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, the digits' pictures, and a folder with rows of each kind."""
    folder = tmp_path_factory.mktemp("offline")
    write_tiny_qwen2_5_vl(folder / "model")
    for name, rows in (("sft", conversation), ("pairs", pair), ("forms", form_pair), ("scored", scored)):
        (folder / name).mkdir()
        write_rows(folder / name, folder / "digits", rows, train=200, validation=60)
    return folder


def words(base: Path, rows: str, folder: Path, *more: str) -> tuple[str, ...]:
    return (f"policy.model={base / 'model'}", f"data.path={base / rows}", f"folder={folder}", "name=run", *more)


def steps_of(folder: Path) -> list[StepRecord]:
    return [record for record in read_records(folder / "metrics.jsonl") if isinstance(record, StepRecord)]


async def test_sft_lowers_the_loss_of_the_assistants_tokens(base: Path, tmp_path: Path) -> None:
    config = offline_config("sft", *words(base, "sft", tmp_path, "num_steps=25", "learner.learning_rate=0.003"))
    metrics = await OfflineRun(config).go()
    losses = [step.values["loss"] for step in steps_of(config.run_folder)]
    assert len(losses) == 25
    assert losses[0] > 5, "a model of random weights"
    assert losses[-1] < 1.2
    first, last = metrics.totals.evaluations
    assert (first.version, last.version) == (0, 25)
    assert metrics.totals.last_values["token_accuracy"] > 0.5
    assert (config.run_folder / "policy" / "model.safetensors").is_file()
    assert metrics.totals.optimizer_steps == 25
    assert len(read_run_folder(config.run_folder).samples.samples) > 0

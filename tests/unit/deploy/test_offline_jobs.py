"""Offline jobs from end to end in one process: the digits as conversations and pairs, on the tiny model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from offline_data import conversation, form_pair, pair, scored, write_rows
from offline_rows import offline_config
from offline_run import OfflineRun
from safetensors.torch import load_file

from mobula.actors.datasets.rows import count_by_reason
from mobula.cluster.errors import NothingTrainedError, RunStopped
from mobula.cluster.metrics.report.run_folder import read_run_folder
from mobula.cluster.metrics.sinks.jsonl import read_records
from mobula.cluster.metrics.step_records import StepRecord
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.cluster.recovery.checkpoints import newest_learner_state
from mobula.cluster.roles import UpdateReport
from mobula.cluster.runtime.placement import NodeResources, needed_roles, plan_placement
from mobula.deploy.host.run_folder import CHECKPOINTS_FOLDER
from mobula.deploy.run import runtime
from mobula.deploy.run.overview import overview
from mobula.deploy.wiring.preparation import prepare
from mobula.learner.examples import collate_examples, end_row, fetch_examples
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl
from mobula.rewards.contract import RewardRequest
from mobula.rewards.isolation.process import Tools
from mobula.rewards.models.reward_model import RewardModel

pytestmark = pytest.mark.slow
QUESTION_PATTERN = r"user\n(?:<\|vision_start\|><\|image_pad\|><\|vision_end\|>)?(?P<question>.*?)<\|im_end\|>"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, the digits' images, and a folder with rows of each kind."""
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


@pytest.mark.parametrize("job", ["sft", "dpo"])
def test_the_screen_before_the_first_step_names_the_objective_and_the_size_of_a_checkpoint(
    base: Path, tmp_path: Path, job: str
) -> None:
    config = offline_config(job, *words(base, {"sft": "sft", "dpo": "pairs"}[job], tmp_path))
    plan = plan_placement(config.resources, [NodeResources("laptop", 2, 0)], needed_roles(config))
    text = overview(prepare(config, lambda media: media), plan, 0)
    assert f"{job} (" in text and "GB on disk" in text


@pytest.mark.core
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


async def test_a_reward_model_ranks_held_out_pairs_and_scores_in_the_reward_pool(base: Path, tmp_path: Path) -> None:
    config = offline_config(
        "reward_model", *words(base, "forms", tmp_path, "num_steps=15", "learner.learning_rate=0.003")
    )
    run = OfflineRun(config)
    metrics = await run.go()
    assert metrics.totals.evaluations[-1].accuracy > 0.9
    assert metrics.totals.last_values["held_out_margin"] > 0.5
    function = RewardModel(
        Tools(isolated=None, device="cpu", dtype="float32"),
        model=str(config.run_folder / "policy"),
        form="chat",
        label=None,
        output="logit",
        question_pattern=QUESTION_PATTERN,
        max_tokens=256,
        batch_size=4,
    )
    rows = run.prepared.usable("validation").rows[:8]
    groups = [run.prepared.processor.prepare(row, f"x/{n}") for n, row in enumerate(rows)]
    requests = [
        RewardRequest(t.response, (), {}, g.group.prompt.text, (row.images[0].read_bytes(),))
        for row, g in zip(rows, groups, strict=True)
        for t in g.group.trajectories
    ]
    found = [outcome.value for outcome in function.score_batch(requests)]
    assert found == pytest.approx(scores_of(run, groups), abs=1e-4), "the pool computes what was trained"
    assert sum(chosen > rejected for chosen, rejected in zip(found[::2], found[1::2], strict=True)) >= 7


def scores_of(run: OfflineRun, groups: list[ScoredGroup]) -> list[float]:
    """What the learner's own model gives each ending."""
    examples = fetch_examples(groups, end_row, 1.0)
    batch = collate_examples(examples, run.learner._reader, run.learner._device)
    with torch.no_grad():
        return run.learner._policy(batch.tokens)[:, 0].tolist()


@pytest.mark.core
async def test_dpo_widens_the_margin_and_a_resumed_run_ends_where_it_would_have(base: Path, tmp_path: Path) -> None:
    more = ("learner.learning_rate=0.0003", "checkpoints.interval_steps=4", "learner.schedule=constant")
    whole = offline_config("dpo", *words(base, "forms", tmp_path / "whole", "num_steps=8", *more))
    run = OfflineRun(whole)
    metrics = await run.go()
    steps = steps_of(whole.run_folder)
    assert steps[0].values["margin"] == pytest.approx(0, abs=1e-4), "the policy is its own reference at first"
    assert steps[0].values["loss"] == pytest.approx(0.693147, abs=1e-3)
    assert steps[-1].values["margin"] > 0.2
    assert metrics.totals.last_values["held_out_margin"] > 0.2
    assert metrics.totals.evaluations[-1].accuracy > 0.9
    assert run.reference.num_scored == 8 * 16 + 40, "held-out pairs are scored once"

    words_of_parts = words(base, "forms", tmp_path / "parts", *more, "resume=auto")
    await OfflineRun(offline_config("dpo", *words_of_parts, "num_steps=4")).go()
    await OfflineRun(parts := offline_config("dpo", *words_of_parts, "num_steps=8")).go()
    ours, theirs = (load_file(c.run_folder / "policy" / "model.safetensors") for c in (whole, parts))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert [s.values["loss"] for s in steps_of(parts.run_folder)] == [s.values["loss"] for s in steps]


async def test_a_job_that_is_stopped_goes_on_from_its_checkpoint_and_ends_where_it_would_have(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ("num_steps=6", "learner.learning_rate=0.003", "checkpoints.interval_steps=0", "resume=auto")
    whole, parts = (offline_config("sft", *words(base, "sft", tmp_path / name, *more)) for name in ("whole", "parts"))
    await OfflineRun(whole).go()
    run = OfflineRun(parts)
    update = run.ranks.update

    async def update_and_stop(groups: Sequence[ScoredGroup]) -> UpdateReport:
        report = await update(groups)
        if report.version == 3:
            assert run.stop.request()
        return report

    monkeypatch.setattr(run.ranks, "update", update_and_stop)
    with pytest.raises(RunStopped):
        await run.go()
    found = newest_learner_state(parts.run_folder / CHECKPOINTS_FOLDER)
    assert found is not None and found[0] == steps_of(parts.run_folder)[-1].step in (3, 4)
    await OfflineRun(parts).go()
    ours, theirs = (load_file(c.run_folder / "policy" / "model.safetensors") for c in (whole, parts))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    losses = [[s.values["loss"] for s in steps_of(config.run_folder)] for config in (whole, parts)]
    assert losses[0] == losses[1] and len(losses[0]) == 6


async def test_regression_learns_the_given_scores(base: Path, tmp_path: Path) -> None:
    words_ = words(base, "scored", tmp_path, "num_steps=15", "learner.learning_rate=0.003")
    metrics = await OfflineRun(offline_config("reward_model", *words_, "offline.reward_model.loss=regression")).go()
    assert metrics.totals.evaluations[-1].accuracy > 0.9
    assert metrics.totals.last_values["held_out_loss"] < 0.1


def test_rows_that_cannot_be_used_are_counted_and_named(base: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (base / "pairs" / "train.jsonl").read_text().splitlines()[:20]]
    del rows[0]["rejected"]
    rows[1]["messages"][0]["content"][0]["image_url"]["url"] = "images/none.png"
    rows[2]["chosen"] = "x" * 400
    shutil.copytree(base / "digits" / "images", tmp_path / "images")
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = offline_config(
        "dpo", f"policy.model={base / 'model'}", f"data.path={tmp_path}", "data.max_skipped_fraction=1"
    )
    prepared = prepare(config, lambda value: value)
    assert count_by_reason(prepared.splits["train"].skipped) == {"missing_pair": 1, "missing_file": 1, "too_long": 1}


def test_a_run_whose_every_step_was_skipped_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = SimpleNamespace(
        accuracy_before=None, accuracy_after=None, values_before={}, optimizer_steps=0, num_steps=3, warnings=()
    )
    monkeypatch.setattr(runtime, "run_training", lambda config, console, **more: summary)
    with pytest.raises(NothingTrainedError, match="3 steps ran and every one of their optimizer steps was skipped"):
        runtime.train(offline_config("sft", "policy.model=x", "data.path=x"))


def test_a_reward_model_without_a_head_is_refused_by_the_pool(base: Path) -> None:
    with pytest.raises(ValueError, match="lacks weights score.weight"):
        RewardModel(
            Tools(isolated=None, device="cpu", dtype="float32"),
            model=str(base / "model"),
            form="chat",
            label=None,
            output="logit",
            question_pattern=None,
            max_tokens=256,
            batch_size=4,
        )

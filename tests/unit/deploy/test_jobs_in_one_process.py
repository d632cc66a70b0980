"""Jobs from end to end in one process: offline jobs, flow models and image tokens."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from flow_run import FlowRun, flow_config, janus_config, made_loud, redness
from metrics_data import FACTS, FakeClock, make_metrics
from offline_rows import conversation, form_pair, offline_config, pair, scored, write_digit_rows
from offline_run import OfflineRun
from one_learner import copied
from PIL import Image, ImageOps
from safetensors.torch import load_file
from transformers import JanusForConditionalGeneration

from mobula.actors.datasets.conversations import read_image_pairs
from mobula.actors.datasets.rows import Turn, count_by_reason
from mobula.actors.processors.worker import ProcessorWorker
from mobula.cluster.errors import DatasetError, NothingTrainedError, PreflightError, RunStopped
from mobula.cluster.metrics.report.run_folder import read_run_folder
from mobula.cluster.metrics.sinks.jsonl import read_records
from mobula.cluster.metrics.step_records import StepRecord
from mobula.cluster.metrics.summary import summarize
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.cluster.recovery.checkpoints import newest_learner_state
from mobula.cluster.roles import UpdateReport
from mobula.cluster.runtime.placement import NodeResources, needed_roles, plan_placement
from mobula.configs.errors import ConfigError
from mobula.configs.load import load_config
from mobula.configs.overrides import overridden
from mobula.configs.schema import RunConfig
from mobula.deploy.host.run_folder import CHECKPOINTS_FOLDER
from mobula.deploy.run import runtime
from mobula.deploy.run.overview import overview
from mobula.deploy.wiring.preparation import prepare
from mobula.examples.glyphs.glyphs import rendered
from mobula.learner.examples import collate_examples, end_row, fetch_examples
from mobula.learner.policies.flow.tiny import write_tiny_flow
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl
from mobula.rewards.contract import RewardRequest
from mobula.rewards.models.reward_model import RewardModel
from mobula.rewards.tools import Tools

QUESTION_PATTERN = r"user\n(?:<\|vision_start\|><\|image_pad\|><\|vision_end\|>)?(?P<question>.*?)<\|im_end\|>"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, the digits' images, and a folder with rows of each kind."""
    folder = tmp_path_factory.mktemp("offline")
    write_tiny_qwen2_5_vl(folder / "model")
    for name, rows in (("sft", conversation), ("pairs", pair), ("forms", form_pair), ("scored", scored)):
        (folder / name).mkdir()
        write_digit_rows(folder / name, folder / "digits", rows, train=200, validation=60)
    return folder


def words(base: Path, rows: str, folder: Path, *more: str) -> tuple[str, ...]:
    return (f"policy.model={base / 'model'}", f"data.path={base / rows}", f"folder={folder}", "name=run", *more)


def steps_of(folder: Path) -> list[StepRecord]:
    return [record for record in read_records(folder / "metrics.jsonl") if isinstance(record, StepRecord)]


@pytest.mark.slow
@pytest.mark.parametrize("job", ["sft", "dpo"])
def test_the_screen_before_the_first_step_names_objective_and_checkpoint(base: Path, tmp_path: Path, job: str) -> None:
    config = offline_config(job, *words(base, {"sft": "sft", "dpo": "pairs"}[job], tmp_path))
    plan = plan_placement(config.resources, [NodeResources("laptop", 2, 0)], needed_roles(config))
    text = overview(prepare(config, lambda media: media), plan, 0)
    assert f"{job} (" in text and "GB on disk" in text


@pytest.mark.slow
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


@pytest.mark.slow
async def test_a_reward_model_ranks_held_out_pairs_and_scores_in_the_reward_pool(base: Path, tmp_path: Path) -> None:
    own = words(base, "forms", tmp_path, "num_steps=15", "learner.learning_rate=0.003")
    config = offline_config("reward_model", *own)
    run = OfflineRun(config)
    metrics = await run.go()
    assert metrics.totals.evaluations[-1].accuracy > 0.9
    assert metrics.totals.last_values["held_out_margin"] > 0.5
    options = {"form": "chat", "label": None, "output": "logit", "question_pattern": QUESTION_PATTERN}
    options |= {"model": str(config.run_folder / "policy"), "max_tokens": 256, "batch_size": 4}
    function = RewardModel(Tools(isolated=None, device="cpu", dtype="float32"), **options)
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
    batch = collate_examples(examples, run.learner.reader, run.learner.device)
    with torch.no_grad():
        return run.learner.policy(batch.tokens)[:, 0].tolist()


@pytest.mark.slow
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


@pytest.mark.slow
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
    assert found[0] == steps_of(parts.run_folder)[-1].step in (3, 4)
    await OfflineRun(parts).go()
    ours, theirs = (load_file(c.run_folder / "policy" / "model.safetensors") for c in (whole, parts))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    losses = [[s.values["loss"] for s in steps_of(config.run_folder)] for config in (whole, parts)]
    assert losses[0] == losses[1] and len(losses[0]) == 6


@pytest.mark.slow
async def test_regression_learns_the_given_scores(base: Path, tmp_path: Path) -> None:
    words_ = words(base, "scored", tmp_path, "num_steps=15", "learner.learning_rate=0.003")
    metrics = await OfflineRun(offline_config("reward_model", *words_, "offline.reward_model.loss=regression")).go()
    assert metrics.totals.evaluations[-1].accuracy > 0.9
    assert metrics.totals.last_values["held_out_loss"] < 0.1


@pytest.mark.slow
def test_rows_that_cannot_be_used_are_counted_and_named(base: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (base / "pairs" / "train.jsonl").read_text().splitlines()[:20]]
    del rows[0]["rejected"]
    rows[1]["messages"][0]["content"][0]["image_url"]["url"] = "images/none.png"
    rows[2]["chosen"] = "x" * 400
    shutil.copytree(base / "digits" / "images", tmp_path / "images")
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = (f"policy.model={base / 'model'}", f"data.path={tmp_path}", "data.max_skipped_fraction=1")
    config = offline_config("dpo", *own)
    prepared = prepare(config, lambda value: value)
    assert count_by_reason(prepared.splits["train"].skipped) == {"missing_pair": 1, "missing_file": 1, "too_long": 1}


@pytest.mark.slow
def test_a_run_whose_every_step_was_skipped_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = summarize(make_metrics([], FakeClock()), FACTS, status="done", version=3, wall_s=1.0)
    summary = replace(nothing, num_steps=3, optimizer_steps=0)
    monkeypatch.setattr(runtime, "run_training", lambda config, console, **more: summary)
    with pytest.raises(NothingTrainedError, match="3 steps ran and every one of their optimizer steps was skipped"):
        runtime.train(offline_config("sft", "policy.model=x", "data.path=x"))


LORA = ("policy.lora.rank=4", "policy.lora.alpha=8", "learner.learning_rate=0.005")


@pytest.mark.parametrize("words", [(), LORA, (*LORA, "weight_sync.payload=adapters")], ids=["full", "lora", "factors"])
async def test_steps_raise_the_reward_and_replay_is_exact(tmp_path: Path, words: tuple[str, ...]) -> None:
    run = await FlowRun(flow_config(tmp_path, *words)).start()
    before = await redness_of(run, 4)
    for version in range(1, 7):
        metrics = await run.step(version)
        gap = metrics["logprob_gap_max"]
        assert gap == 0 if not words else gap < 1e-4, "merged adapters compute the same to rounding only"
    after = await redness_of(run, 4)
    difference = after - before
    assert difference.mean() > 3 * difference.std() / np.sqrt(difference.size), (before.mean(), after.mean())


async def redness_of(run: FlowRun, num_prompts: int) -> np.ndarray:
    """[N]: of images with seeds that training does not use."""
    groups = await run.groups(run.prompts(num_prompts), 1000)
    return np.array([redness(t.response.images[0]) for group in groups for t in group.trajectories])


async def test_a_canary_proves_a_push(tmp_path: Path) -> None:
    run = await FlowRun(flow_config(tmp_path)).start()
    [prompt] = run.prompts(1)
    before = await run.actor.prompt_logprobs(prompt)
    np.testing.assert_array_equal(before, run.learner.sequence_logprobs(prompt))
    groups = await run.groups([prompt], 1)
    assert groups[0].trajectories[0].weight_versions.tolist() == [0] * 4
    await run.step(1)
    after = await run.actor.prompt_logprobs(prompt)
    np.testing.assert_array_equal(after, run.learner.sequence_logprobs(prompt))
    assert np.abs(after - before).max() > 1e-4


async def test_the_divergence_from_the_base_is_zero_at_first_and_grows(tmp_path: Path) -> None:
    run = await FlowRun(flow_config(tmp_path, *LORA, "algorithm.kl.coef=0.04")).start()
    first, second = await run.step(1), await run.step(2)
    assert first["kl"] == 0 and second["kl"] > 0


async def test_an_exported_policy_is_a_pipeline_with_the_trained_weights(tmp_path: Path) -> None:
    run = await FlowRun(flow_config(tmp_path, *LORA)).start()
    await run.step(1)
    run.learner.export(tmp_path / "policy")
    file = "transformer/diffusion_pytorch_model.safetensors"
    base, trained = load_file(tmp_path / "model" / file), load_file(tmp_path / "policy" / file)
    assert base.keys() == trained.keys()
    assert {name for name in base if not np.array_equal(base[name], trained[name])}
    expected = copied(run.learner)
    assert all(np.array_equal(expected[name].numpy(), tensor) for name, tensor in trained.items())
    DiffusionPipeline.from_pretrained(tmp_path / "policy")
    again = await FlowRun(flow_config(tmp_path, f"policy.model={tmp_path / 'policy'}")).start()
    [prompt] = run.prompts(1)
    np.testing.assert_array_equal(await again.actor.prompt_logprobs(prompt), await run.actor.prompt_logprobs(prompt))


async def test_a_saved_learner_goes_on_bit_for_bit(tmp_path: Path) -> None:
    run = await FlowRun(flow_config(tmp_path)).start()
    await run.step(1)
    run.learner.save(tmp_path / "state")
    run.learner.finish_save()
    expected = await run.step(2)
    again = await FlowRun(flow_config(tmp_path)).start()
    assert again.learner.load(tmp_path / "state") == 1
    await again.push()
    assert await again.step(2) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("algorithm.kl.coef=0.1",), r"policy\.lora\.rank above 0"),
        (("sampler.flow.window_end=6",), "bounds of steps from 0 to 5 of 5"),
        (("sampler.flow.kernel=cps", "sampler.flow.window_end=5"), "bounds of steps from 0 to 4 of 5"),
        (("algorithm.entropy.bonus=0.1",), r"algorithm\.entropy\.bonus \(set algorithm\.entropy\.bonus=0\)"),
        (("resources.reference.num_workers=1",), r"set resources\.reference\.num_workers=0"),
        (("sampler.temperature=0.8",), r"set sampler\.temperature=1"),
    ],
)
def test_what_a_flow_model_cannot_do_is_refused(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        flow_config(tmp_path, *words)


Janus = Callable[..., RunConfig]
GAP = 1e-5  # of log-probs: sampled with a cache, replayed in one forward pass


@pytest.fixture
def janus(one_thread: None, tmp_path: Path) -> Janus:
    """The run's config with further words."""
    return partial(janus_config, tmp_path)


@pytest.mark.parametrize("words", [(), ("policy.lora.rank=8", "learner.learning_rate=0.005")], ids=["full", "lora"])
async def test_training_raises_the_share_of_a_colour(janus: Janus, words: tuple[str, ...]) -> None:
    run = await FlowRun(janus(*words)).start()
    before = await redness_of(run, 6)
    for version in range(1, 13):
        assert (await run.step(version))["logprob_gap_max"] < (1e-4 if words else GAP)
    after = await redness_of(run, 6)
    error = np.sqrt(before.var() / before.size + after.var() / after.size)
    assert after.mean() - before.mean() > 3 * error, (before.mean(), after.mean(), error)


async def test_adapters_are_held_to_the_model_without_them(janus: Janus) -> None:
    """The reference is the policy with its adapters off: the KL term is 0 before the first step, and then above 0."""
    kl = ("algorithm.kl.coef=0.1", "policy.lora.rank=8", "reference.place=learner_ranks", "learner.learning_rate=0.005")
    run = await FlowRun(janus(*kl)).start()
    first, second = [await run.step(version) for version in (1, 2)]
    assert abs(first["kl"]) < 1e-7 < 1e-5 < second["kl"]
    with pytest.raises(ConfigError, match=r"algorithm\.kl\.coef \(set .* reference\.place=learner_ranks"):
        janus("algorithm.kl.coef=0.1", "policy.lora.rank=8")


@pytest.mark.parametrize("guidance", [2.0, 5.0])
async def test_greedy_images_are_those_of_transformers(tmp_path: Path, janus: Janus, guidance: float) -> None:
    run = await FlowRun(janus(f"sampler.image_tokens.guidance={guidance}")).start()
    [prompt] = run.prompts(1)
    [group] = await run.groups([prompt], 1, temperature=0.0)
    own = group.trajectories[0]
    model = JanusForConditionalGeneration.from_pretrained(tmp_path / "model").eval()
    ids = torch.from_numpy(prompt.expanded_ids).long()[None]
    words = {"generation_mode": "image", "do_sample": False, "guidance_scale": guidance}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **words)
    assert own.actions.token_ids.tolist() == expected[0].tolist()
    pixels = (model.decode_image_tokens(expected)[0].detach() / 2 + 0.5).clamp(0, 1) * 255
    shown = np.asarray(Image.open(io.BytesIO(own.response.images[0])))
    np.testing.assert_allclose(shown, pixels.numpy(), atol=0.51)
    assert own.response.text == "" and own.finish_reason == "stop"


async def test_a_sibling_does_not_depend_on_how_many_are_drawn_side_by_side(janus: Janus) -> None:
    whole = await FlowRun(janus()).start()
    parts = await FlowRun(janus("sampler.image_tokens.batch_size=3")).start()
    prompts = whole.prompts(1)
    [one], [other] = await whole.groups(prompts, 1), await parts.groups(prompts, 1)
    tokens = [t.actions.token_ids.tolist() for t in one.trajectories]
    assert tokens == [t.actions.token_ids.tolist() for t in other.trajectories]
    assert len(set(map(tuple, tokens))) == len(tokens)


async def test_a_canary_proves_a_push_and_the_export_is_the_trained_model(tmp_path: Path, janus: Janus) -> None:
    run = await FlowRun(janus()).start()
    [prompt] = run.prompts(1)
    before = await run.actor.prompt_logprobs(prompt)
    await run.step(1)
    after = await run.actor.prompt_logprobs(prompt)
    np.testing.assert_allclose(after, run.learner.sequence_logprobs(prompt), atol=GAP)
    assert np.abs(after - before).max() > 1e-3
    run.learner.export(tmp_path / "policy")
    again = await FlowRun(janus(f"policy.model={tmp_path / 'policy'}")).start()
    np.testing.assert_array_equal(await again.actor.prompt_logprobs(prompt), after)


async def test_guidance_changes_what_is_scored(janus: Janus) -> None:
    found = []
    for guidance in (1.0, 5.0):
        run = await FlowRun(janus(f"sampler.image_tokens.guidance={guidance}")).start()
        found.append(await run.actor.prompt_logprobs(run.prompts(1)[0]))
    assert np.abs(found[0] - found[1]).max() > 1e-2


def test_only_what_predicts_image_tokens_is_trained(janus: Janus) -> None:
    run = FlowRun(janus())
    run.learner.connect("")
    trained = {name for name, p in run.learner.policy.model.named_parameters() if p.requires_grad}
    assert {name.split(".")[1] for name in trained} == {
        "generation_aligner", "generation_embeddings", "generation_head", "language_model",
    }  # fmt: skip


def test_a_processor_worker_prepares_its_rows_and_skips_what_it_cannot(janus: Janus) -> None:
    run = FlowRun(janus())
    [row, *_], worker = run.prepared.usable("train").rows, ProcessorWorker(run.config)
    [made] = worker.prepare(row, "0/0/x", frozenset())
    assert made.prompt is not None and run.prepared.processor.num_media(row) == 0
    [skipped] = worker.prepare(replace(row, history=(Turn("user", "Draw."),)), "0/1/x", frozenset())
    assert skipped.prompt is None and "1 turns before the question" in skipped.detail


@pytest.mark.parametrize("kind", ["vllm", "huggingface"])
def test_other_samplers_are_refused_by_name(janus: Janus, kind: str) -> None:
    config = janus(f"sampler={kind}")
    with pytest.raises(PreflightError, match=rf"which sampler\.kind={kind} cannot sample: set sampler=image_tokens"):
        prepare(config, lambda value: value)


def test_a_model_of_text_draws_nothing(tmp_path: Path, janus: Janus) -> None:
    config = janus("policy=tiny_qwen3", f"policy.model={tmp_path / 'qwen'}")
    with pytest.raises(PreflightError, match="draws no images, as sampler.kind=image_tokens asks: name a checkpoint"):
        prepare(config, lambda value: value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("algorithm.kl.coef=0.1", r"kl\.coef \(set algorithm\.kl\.coef=0, or policy\.lora\.rank above 0 and reference"),
        ("sampler.top_k=5", r"set sampler\.top_p=1 sampler\.top_k=0 sampler\.min_p=0"),
        ("sampler.stop_strings=[x]", r"set sampler\.stop_strings=\[\]"),
    ],
)
def test_what_image_tokens_cannot_do_is_refused(janus: Janus, words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        janus(words)


WORDS = (
    "experiment=dpo", "policy=tiny_sd3_glyphs", "sampler=flow", "sampler.flow.height=16", "sampler.flow.width=16",
    "sampler.flow.guidance=1", "sampler.flow.max_text_tokens=1", "learner=single",
    "learner.activation_checkpointing=none", "learner.learning_rate=0.002", "learner.warmup_steps=0",
    "resources.learner.num_workers=1", "resources.reference.num_workers=0", "offline.batch_size=16",
    "offline.dpo.beta=20", "evaluation.num_prompts=16", "evaluation.interval_steps=0", "num_steps=15",
    "metrics.ray=false", "metrics.tensorboard=false", "metrics.progress=false",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and pairs whose better image is white on black and the other black on white."""
    found = tmp_path_factory.mktemp("pairs")
    made_loud(write_tiny_flow("sd3_glyphs", found / "model"))
    for split, numbers in (("train", range(0, 80)), ("validation", range(80, 100))):
        rows = []
        for number in numbers:
            better, worse = found / f"{number}.png", found / f"{number}.npy"
            image = rendered(f"{number:02d}", 11.5, (0, 0))
            image.save(better)
            inverted = np.asarray(ImageOps.invert(image), dtype=np.float32)[None] / 127.5 - 1
            np.save(worse, inverted)
            rows.append({"prompt": f"write {number:02d}", "chosen": better.name, "rejected": worse.name})
        (found / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return found


def config(folder: Path, runs: Path, *words: str) -> RunConfig:
    own = (f"policy.model={folder / 'model'}", f"data.path={folder}", f"folder={runs}", "name=run")
    return load_config(overridden([*WORDS, *own], words))


@pytest.mark.parametrize("words", [(), ("policy.lora.rank=8", "learner.learning_rate=0.01")], ids=["full", "lora"])
async def test_pairs_teach_which_image_is_preferred(folder: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    found = config(folder, tmp_path, *words)
    metrics = await OfflineRun(found).go()
    first, last = metrics.totals.evaluations
    assert first.values["loss"] == pytest.approx(np.log(2), abs=1e-5), "at first it is the initial policy"
    assert last.values["margin"] > 0 and last.accuracy > 0.9
    assert last.values["loss"] < first.values["loss"]
    assert (found.run_folder / "policy" / "model_index.json").is_file()


def test_rows_that_cannot_be_used_are_named(folder: Path, tmp_path: Path) -> None:
    good = {"prompt": "write 42", "chosen": "a.png", "rejected": "b.png"}
    for name in ("a.png", "b.png"):
        Image.new("L", (16, 16)).save(tmp_path / name)
    bad = [
        {**good, "prompt": " "}, {**good, "chosen": "../a.png"}, {**good, "rejected": "none.png"},
        {**good, "rejected": "a.png"}, {**good, "chosen": 3}, [],
    ]  # fmt: skip
    (tmp_path / "train.jsonl").write_text("\n".join([*map(json.dumps, (good, *bad)), "{"]), encoding="utf-8")
    found = read_image_pairs(tmp_path, "train")
    assert [row.question for row in found.rows] == ["write 42"]
    assert count_by_reason(found.skipped) == {
        "missing_prompt": 1, "outside_folder": 1, "missing_file": 1, "same_image": 1, "missing_image": 1,
        "broken_json": 2,
    }  # fmt: skip
    with pytest.raises(DatasetError, match="does not exist"):
        read_image_pairs(tmp_path, "test")


def test_sharded_weights_of_deepspeed_are_not_exchanged_with_the_initial_ones(folder: Path, tmp_path: Path) -> None:
    words = ("learner=deepspeed", "resources.learner.num_workers=2")
    config(folder, tmp_path, *words, "learner.zero_stage=2")
    message = r"offline\.job=dpo of a flow model .*set learner\.zero_stage=2, or use learner=fsdp2"
    with pytest.raises(ConfigError, match=message):
        config(folder, tmp_path, *words, "learner.zero_stage=3")

"""The glyphs: data, the model that learns to write them, its warm start and the algorithms, in seconds."""

from __future__ import annotations

import io
import json
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from flow_run import FlowRun, made_loud
from one_learner import at_hand
from PIL import Image

from mobula.actors.datasets.rows import Row
from mobula.actors.processors.flow import FlowProcessor
from mobula.cluster.errors import PromptError, RewardError
from mobula.cluster.records.media import MediaStore
from mobula.cluster.records.trajectory import Response, Reward, ScoredGroup
from mobula.configs.load import ConfigError, load_config
from mobula.configs.schema import RunConfig
from mobula.deploy.wiring.warm_start import _examples
from mobula.examples.glyphs.glyphs import rendered, write_glyphs
from mobula.examples.glyphs.template_digits import template_digits as judge
from mobula.learner.policies.flow.checkpoint import FlowCheckpoint
from mobula.learner.policies.flow.tiny import write_tiny_flow
from mobula.rewards.contract import RewardRequest, evaluate
from mobula.rewards.functions import build_function
from mobula.rewards.isolation.process import IsolatedProcess
from mobula.rewards.tools import Tools

SMALL = (
    "learner=single", "resources.learner.num_workers=1", "algorithm.prompts_per_step=2",
    "algorithm.samples_per_prompt=6", "sampler.flow.num_steps=4", "warm_start.num_steps=30",
    "warm_start.batch_size=16", "warm_start.learning_rate=0.003",
)  # fmt: skip
NFT = (*SMALL, "sampler.flow.window_start=3", "sampler.flow.window_end=4")
GRPO = (*SMALL, "sampler.flow.window_end=3")
glyph_run = partial(FlowRun, writes=False)  # rows are there


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("glyphs")
    write_tiny_flow("sd3_glyphs", found / "model")
    made_loud(write_tiny_flow("sd3_glyphs", found / "loud"))
    write_glyphs(found / "data")
    return found


def config(folder: Path, experiment: str, *words: str, model: str = "loud") -> RunConfig:
    own = (f"policy.model={folder / model}", f"data.path={folder / 'data'}", f"folder={folder / 'runs'}")
    return load_config([f"experiment={experiment}", *own, *words])


async def update(run: FlowRun, version: int) -> dict[str, float]:
    """One step on how bright the images are."""
    groups = await run.groups(run.prompts(run.config.algorithm.prompts_per_step), version)
    scored = [
        ScoredGroup(g.summary(), g, tuple(Reward(brightness(t.response.images[0])) for t in g.trajectories))
        for g in groups
    ]
    metrics = run.learner.update(scored, version).metrics
    await run.push()
    return metrics


def brightness(image: bytes) -> float:
    return float(np.asarray(Image.open(io.BytesIO(image)).convert("L")).mean() / 255)


async def mean_brightness(run: FlowRun) -> np.ndarray:
    groups = await run.groups(run.prompts(8), 1000, temperature=0.0)
    return np.array([brightness(t.response.images[0]) for group in groups for t in group.trajectories])


def test_numbers_are_in_one_split_each_and_have_renderings(folder: Path) -> None:
    rows = {s: [json.loads(line) for line in (folder / "data" / f"{s}.jsonl").open()] for s in ("train", "test")}
    numbers = {split: {row["answer"] for row in found} for split, found in rows.items()}
    assert len(numbers["test"]) >= 40 and len(numbers["train"]) >= 50 and not numbers["train"] & numbers["test"]
    row = rows["train"][0]
    assert row["question"] == f"write {row['answer']}"
    images = [folder / "data" / name for name in row["metadata"]["target_images"]]
    assert len({path.read_bytes() for path in images}) > len(images) / 2
    assert Image.open(images[0]).size == (16, 16)
    assert write_glyphs(folder / "data") == folder / "data", "what is there is left alone"
    with pytest.raises(ValueError, match="choose another folder"):
        write_glyphs(folder / "data", seed=1)


def test_the_judge_and_ocr_read_what_is_rendered() -> None:
    tools = Tools(IsolatedProcess(timeout_s=5, start_timeout_s=5), "cpu", "float32")
    options = {"layout": "line", "target": "reference", "exact": True, "frame_stride": 1, "num_threads": 1}
    ocr = build_function("ocr", options, tools)
    numbers = [f"{n:02d}" for n in range(3, 100, 8)]
    requests = [request(rendered(text, 11.5, (0.5, -0.5)), text) for text in numbers]
    assert np.mean([judge(r).value for r in requests]) >= 0.95
    assert np.mean([evaluate(ocr, r).value for r in requests]) >= 0.9
    assert judge(request(rendered("42", 11.5, (0, 0)), "47")).value == 0.5
    assert judge(request(Image.new("L", (16, 16)), "47")).value <= 0.5
    for bad, message in ((("",), "no number"), (("1234",), "no number"), ((), "no number")):
        with pytest.raises(RewardError, match=message):
            judge(RewardRequest(Response("", 1, False, (b"x",)), bad, {}, ""))


def request(image: Image.Image, text: str) -> RewardRequest:
    file = io.BytesIO()
    image.save(file, "PNG")
    return RewardRequest(Response("", 1, False, (file.getvalue(),)), (text,), {}, "")


def test_latents_are_the_images(folder: Path) -> None:
    checkpoint = FlowCheckpoint(str(folder / "model"))
    image = np.asarray(rendered("42", 12.0, (0, 0)).convert("RGB"))[None]
    with torch.no_grad():
        vae = checkpoint.vae(torch.float32)
        latents = checkpoint.family.encode_images(vae, image)
        again = checkpoint.family.decode(vae, latents)[:, 0]
    assert latents.shape == (1, 1, 16, 16)
    np.testing.assert_allclose(latents[0, 0].numpy(), image[0, ..., 0] / 127.5 - 1, atol=1e-5)
    assert np.abs(again.astype(int) - image).max() <= 1
    pipeline = DiffusionPipeline.from_pretrained(folder / "model")
    assert pipeline("write 42", height=16, width=16, num_inference_steps=2).images[0].size == (16, 16)


async def test_a_warm_start_teaches_images(folder: Path) -> None:
    run = glyph_run(config(folder, "glyphs_nft", *NFT, model="model"))
    run.learner.connect("")
    examples = _examples(run.prepared)
    prompts = run.prompts(8)
    checks = at_hand([await examples.checked(prompt, n) for n, prompt in enumerate(prompts)])
    assert run.learner.answer_accuracy(checks) < 0.05, "the output of the model begins at 0"
    losses = []
    for step in range(30):
        batch = [await examples.taught(prompts[n % 8], 16 * step + n) for n in range(16)]
        losses.append(run.learner.supervised_step(at_hand(batch))["loss"])
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])
    assert run.learner.answer_accuracy(checks) > 0.3


async def test_a_share_of_the_images_is_taught_with_the_negative_prompt(folder: Path) -> None:
    words = (*GRPO, "sampler.flow.guidance=2", "warm_start.text_dropout=0.25")
    run = glyph_run(config(folder, "glyphs_grpo", *words, model="model"))
    examples, [prompt] = _examples(run.prepared), run.prompts(1)
    own, negative = prompt.media
    assert own.key != negative.key
    taught = [(await examples.taught(prompt, seed)).sequence for seed in range(400)]
    assert {sequence.media for sequence in taught} == {(own,), (negative,)}
    share = np.mean([sequence.media == (negative,) for sequence in taught])
    assert abs(share - 0.25) < 4 * np.sqrt(0.25 * 0.75 / 400)
    assert (await examples.taught(prompt, 7)).sequence.media == taught[7].media, "the seed decides"
    checked = [(await examples.checked(prompt, seed)).sequence.media for seed in range(50)]
    assert set(checked) == {(own,)}, "what is checked is its own prompt"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "names no images to learn from"),
        ({"target_images": ["../secret.png"]}, "is not below data.path"),
        ({"target_images": ["images/none.png"]}, "cannot be read"),
        ({"target_images": ["large.png"]}, "is 20 x 16, and images of this run are 16 x 16"),
    ],
)
def test_images_that_cannot_be_taught_are_named(folder: Path, metadata: dict, message: str) -> None:
    run = glyph_run(config(folder, "glyphs_nft", *NFT))
    Image.new("L", (20, 16)).save(folder / "data" / "large.png")
    assert isinstance(run.prepared.processor, FlowProcessor)
    with pytest.raises(PromptError, match=message):
        run.prepared.processor.clean(replace(run.prompts(1)[0], metadata=metadata), 0)


@pytest.mark.parametrize(
    ("experiment", "words"),
    [
        ("glyphs_nft", NFT),
        ("glyphs_nft", (*NFT, "policy.lora.rank=8", "algorithm.kl.coef=0.01")),
        ("glyphs_grpo", (*GRPO, "algorithm=grpo_guard")),
        ("glyphs_grpo", (*GRPO, "sampler.flow.window_size=2", "algorithm.losses.ppo_clip.clip_low=0.01")),
    ],
    ids=["nft", "nft lora", "guard", "mix"],
)
async def test_each_algorithm_raises_its_reward(folder: Path, experiment: str, words: tuple[str, ...]) -> None:
    faster = (*words, f"learner.learning_rate={0.01 if 'policy.lora.rank=8' in words else 0.003}")
    run = await glyph_run(config(folder, experiment, *faster)).start()
    before = await mean_brightness(run)
    reports = [await update(run, version) for version in range(1, 8)]
    difference = await mean_brightness(run) - before
    assert difference.mean() > 3 * difference.std() / np.sqrt(difference.size), difference.mean()
    assert all(np.isfinite(report["loss"]) for report in reports)
    if experiment == "glyphs_grpo" and not run.config.policy.lora.is_on:
        assert max(report["logprob_gap_max"] for report in reports) < 1e-5


async def test_nft_samples_with_the_slow_copy_and_goes_on_from_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    words = (*NFT, "algorithm.losses.nft.decay_rate=0.5", "algorithm.losses.nft.max_decay=0.5")
    run = await glyph_run(config(folder, "glyphs_nft", *words)).start()
    start = {name: tensor.clone() for name, tensor in run.learner._slow.tensors.items()}
    await update(run, 1)
    weights = {name: p.detach() for name, p in run.learner.policy.named_parameters()}
    name = "model.proj_out.weight"
    expected = 0.5 * start[name] + 0.5 * weights[name]
    torch.testing.assert_close(run.learner._slow.tensors[name], expected)
    assert not torch.equal(weights[name], expected)
    [prompt] = run.prompts(1)
    np.testing.assert_array_equal(await run.actor.prompt_logprobs(prompt), run.learner.sequence_logprobs(prompt))
    torch.testing.assert_close(run.actor._sampler._model.state_dict()["proj_out.weight"], expected)
    run.learner.save(tmp_path / "state")
    run.learner.finish_save()
    following = await update(run, 2)
    again = await glyph_run(config(folder, "glyphs_nft", *words)).start()
    assert again.learner.load(tmp_path / "state") == 1
    await again.push()
    assert await update(again, 2) == following


@pytest.mark.parametrize(
    ("experiment", "words", "message"),
    [
        ("glyphs_nft", ("sampler.flow.window_end=9", "sampler.flow.window_start=8"), "window_start=9, window_end=10"),
        ("glyphs_nft", ("sampler.flow.guidance=2",), "trains velocities without guidance"),
        ("glyphs_nft", ("algorithm.num_epochs=2",), "draws the same noise"),
        ("glyphs_nft", ("algorithm.loss=ppo_clip",), "samples without a likelihood"),
        ("glyphs_nft", ("learner=deepspeed",), "use learner=fsdp2"),
        ("glyphs_grpo", ("algorithm.loss=grpo_guard",), "set algorithm.old_logprobs=recomputed"),
        ("digits", ("algorithm.loss=nft",), "is for flow models"),
        ("glyphs_grpo", ("warm_start.text_dropout=0.1",), "guidance=1 samples without one"),
        ("digits", ("warm_start.text_dropout=0.1",), "set warm_start.text_dropout=0, or sampler=flow"),
        ("digits", ("evaluation.num_samples=4",), "all the same"),
    ],
)
def test_what_does_not_fit_is_refused(experiment: str, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([f"experiment={experiment}", *words])


def processor(folder: Path, model: Path, *words: str) -> FlowProcessor:
    own = config(folder, "glyphs_nft", *words)
    store = MediaStore(lambda medium: medium, 1 << 24)
    return FlowProcessor(FlowCheckpoint(str(model)), own.data, own.sampler.flow, store)


def test_a_text_that_is_cut_is_named_and_others_are_not(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The pipeline's own warnings, one for each encoder of each text, do not appear: the T5 of the glyphs reads one
    token, and their CLIPs read all."""
    pipeline = logging.getLogger("diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3")
    pipeline.addHandler(caplog.handler)
    try:
        glyphs = processor(folder, folder / "model")
        for n in range(20):
            glyphs.prepare(Row(f"row-{n}", f"write {n:02d}", "", ""), f"0/{n}/row-{n}")
        assert caplog.records == [], "prompts of the task are read whole"

        with_t5 = processor(folder, write_tiny_flow("sd3", folder / "sd3"), "sampler.flow.max_text_tokens=100")
        for n, length in enumerate((98, 150, 151, 152, 153)):  # letters, beside two tokens around a text
            with_t5.prepare(Row(f"long-{n}", "a" * length, "", ""), f"0/{n}/long-{n}")
    finally:
        pipeline.removeHandler(caplog.handler)
    messages = [record.getMessage() for record in caplog.records if not record.name.startswith("transformers")]
    assert [message.split(" so far")[0].split(": ")[1] for message in messages] == ["1", "2", "4"], messages
    assert "by 52 tokens: 'aaa" in messages[0] and "max_text_tokens=152 or more" in messages[0]

"""A Janus is trained on its image tokens: sampled and scored alike, updated, pushed and exported."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flow_run import FlowRun, janus_config, redness
from PIL import Image
from transformers import JanusForConditionalGeneration

from mobula.actors.datasets.rows import Turn
from mobula.actors.processors.worker import ProcessorWorker
from mobula.cluster.errors import PreflightError
from mobula.configs.load import ConfigError
from mobula.deploy.wiring.preparation import prepare

pytestmark = pytest.mark.usefixtures("one_thread")
GAP = 1e-5  # of log-probs: sampled with a cache, replayed in one forward pass


async def redness_of(run: FlowRun) -> np.ndarray:
    """[N]: of images with seeds that training does not use."""
    groups = await run.groups(run.prompts(6), 1000)
    return np.array([redness(t.response.images[0]) for group in groups for t in group.trajectories])


@pytest.mark.parametrize("words", [(), ("policy.lora.rank=8", "learner.learning_rate=0.005")], ids=["full", "lora"])
async def test_training_raises_the_share_of_a_colour(tmp_path: Path, words: tuple[str, ...]) -> None:
    run = await FlowRun(janus_config(tmp_path, *words)).start()
    before = await redness_of(run)
    for version in range(1, 13):
        assert (await run.step(version))["logprob_gap_max"] < (1e-4 if words else GAP)
    after = await redness_of(run)
    error = np.sqrt(before.var() / before.size + after.var() / after.size)
    assert after.mean() - before.mean() > 3 * error, (before.mean(), after.mean(), error)


async def test_adapters_are_held_to_the_model_without_them(tmp_path: Path) -> None:
    """The reference is the policy with its adapters off: the KL term is 0 before the first step, and then above 0."""
    kl = ("algorithm.kl.coef=0.1", "policy.lora.rank=8", "reference.place=learner_ranks", "learner.learning_rate=0.005")
    run = await FlowRun(janus_config(tmp_path, *kl)).start()
    first, second = [await run.step(version) for version in (1, 2)]
    assert abs(first["kl"]) < 1e-7 < 1e-5 < second["kl"]
    with pytest.raises(ConfigError, match=r"algorithm\.kl\.coef \(set .* reference\.place=learner_ranks"):
        janus_config(tmp_path, "algorithm.kl.coef=0.1", "policy.lora.rank=8")


@pytest.mark.parametrize("guidance", [2.0, 5.0])
async def test_greedy_images_are_those_of_transformers(tmp_path: Path, guidance: float) -> None:
    run = await FlowRun(janus_config(tmp_path, f"sampler.image_tokens.guidance={guidance}")).start()
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


async def test_a_sibling_does_not_depend_on_how_many_are_drawn_side_by_side(tmp_path: Path) -> None:
    whole = await FlowRun(janus_config(tmp_path)).start()
    parts = await FlowRun(janus_config(tmp_path, "sampler.image_tokens.batch_size=3")).start()
    prompts = whole.prompts(1)
    [one], [other] = await whole.groups(prompts, 1), await parts.groups(prompts, 1)
    tokens = [t.actions.token_ids.tolist() for t in one.trajectories]
    assert tokens == [t.actions.token_ids.tolist() for t in other.trajectories]
    assert len(set(map(tuple, tokens))) == len(tokens)


async def test_a_canary_proves_a_push_and_the_export_is_the_trained_model(tmp_path: Path) -> None:
    run = await FlowRun(janus_config(tmp_path)).start()
    [prompt] = run.prompts(1)
    before = await run.actor.prompt_logprobs(prompt)
    await run.step(1)
    after = await run.actor.prompt_logprobs(prompt)
    np.testing.assert_allclose(after, run.learner.sequence_logprobs(prompt), atol=GAP)
    assert np.abs(after - before).max() > 1e-3
    run.learner.export(tmp_path / "policy")
    again = await FlowRun(janus_config(tmp_path, f"policy.model={tmp_path / 'policy'}")).start()
    np.testing.assert_array_equal(await again.actor.prompt_logprobs(prompt), after)


async def test_guidance_changes_what_is_scored(tmp_path: Path) -> None:
    found = []
    for guidance in (1.0, 5.0):
        run = await FlowRun(janus_config(tmp_path, f"sampler.image_tokens.guidance={guidance}")).start()
        found.append(await run.actor.prompt_logprobs(run.prompts(1)[0]))
    assert np.abs(found[0] - found[1]).max() > 1e-2


def test_only_what_predicts_image_tokens_is_trained(tmp_path: Path) -> None:
    run = FlowRun(janus_config(tmp_path))
    run.learner.connect("")
    trained = {name for name, p in run.learner._policy.model.named_parameters() if p.requires_grad}
    assert {name.split(".")[1] for name in trained} == {
        "generation_aligner",
        "generation_embeddings",
        "generation_head",
        "language_model",
    }


def test_a_processor_worker_prepares_its_rows_and_skips_what_it_cannot(tmp_path: Path) -> None:
    run = FlowRun(janus_config(tmp_path))
    [row, *_], worker = run.prepared.usable("train").rows, ProcessorWorker(run.config)
    [made] = worker.prepare(row, "0/0/x", frozenset())
    assert made.prompt is not None and run.prepared.processor.num_media(row) == 0
    [skipped] = worker.prepare(replace(row, history=(Turn("user", "Draw."),)), "0/1/x", frozenset())
    assert skipped.prompt is None and "1 turns before the question" in skipped.detail


@pytest.mark.parametrize("kind", ["vllm", "huggingface"])
def test_other_samplers_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    config = janus_config(tmp_path, f"sampler={kind}")
    with pytest.raises(PreflightError, match=rf"which sampler\.kind={kind} cannot sample: set sampler=image_tokens"):
        prepare(config, lambda value: value)


def test_a_model_of_text_draws_nothing(tmp_path: Path) -> None:
    config = janus_config(tmp_path, "policy=tiny_qwen3", f"policy.model={tmp_path / 'qwen'}")
    with pytest.raises(PreflightError, match="draws no images, as sampler.kind=image_tokens asks: name a checkpoint"):
        prepare(config, lambda value: value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "algorithm.kl.coef=0.1",
            r"algorithm\.kl\.coef \(set algorithm\.kl\.coef=0, or policy\.lora\.rank above 0 and reference\.place",
        ),
        ("sampler.top_k=5", r"set sampler\.top_p=1 sampler\.top_k=0 sampler\.min_p=0"),
        ("sampler.stop_strings=[x]", r"set sampler\.stop_strings=\[\]"),
    ],
)
def test_what_image_tokens_cannot_do_is_refused(tmp_path: Path, words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        janus_config(tmp_path, words)

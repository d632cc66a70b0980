"""Runs of a model that draws continuous image tokens, in one process: sampling, training, pushes, warm start."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from flow_run import FlowRun, made_loud_patches, patch_config
from one_learner import at_hand
from PIL import Image

from mobula.cluster.errors import PreflightError
from mobula.cluster.records.actions import PatchActions
from mobula.cluster.records.arrow import from_batch, to_batch
from mobula.cluster.records.trajectory import Reward, ScoredGroup, TrajectoryGroup
from mobula.configs.load import ConfigError, load_config
from mobula.configs.schema import RunConfig
from mobula.deploy.wiring.preparation import prepare
from mobula.deploy.wiring.warm_start import _examples
from mobula.examples.glyphs.glyphs import write_glyphs

Config = Callable[..., RunConfig]
GAP = 1e-5  # of log-probs: the pass that sampled reads a cache
LORA = ("policy.lora.rank=8", "learner.learning_rate=0.005")


@pytest.fixture
def config(one_thread: None, tmp_path: Path) -> Config:
    """The run's config with further words; the model is loud."""
    made_loud_patches(tmp_path / "model")
    return partial(patch_config, tmp_path)


def brightness(group: TrajectoryGroup) -> list[float]:
    images = (Image.open(io.BytesIO(t.response.images[0])).convert("L") for t in group.trajectories)
    return [float(np.asarray(image).mean() / 255) for image in images]


async def step(run: FlowRun, version: int) -> dict[str, float]:
    groups = await run.groups(run.prompts(run.config.algorithm.prompts_per_step), version)
    scored = [ScoredGroup(g.summary(), g, tuple(map(Reward, brightness(g)))) for g in groups]
    metrics = run.learner.update(scored, version).metrics
    await run.push()
    return dict(metrics)


async def mean_brightness(run: FlowRun) -> np.ndarray:
    return np.concatenate([brightness(g) for g in await run.groups(run.prompts(4), 1000, temperature=0.0)])


@pytest.mark.parametrize("words", [("sampler.flow.window_size=2",), LORA], ids=["window", "lora"])
async def test_training_raises_brightness_and_replay_is_exact(config: Config, words: tuple[str, ...]) -> None:
    run = await FlowRun(config(*words)).start()
    before = await mean_brightness(run)
    gaps = [(await step(run, version))["logprob_gap_max"] for version in range(1, 9)]
    assert max(gaps) <= (1e-5 if words is LORA else 0), "merged adapters are rounded, all else is the same"
    after = await mean_brightness(run)
    error = np.sqrt(before.var() / before.size + after.var() / after.size)
    assert after.mean() - before.mean() > 3 * error, (before.mean(), after.mean(), error)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
async def test_recorded_log_probs_are_those_of_sampling(
    config: Config, guidance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorded ones come from one pass over the whole image, those of sampling from a pass with a cache."""
    run = await FlowRun(config(f"sampler.flow.guidance={guidance}")).start()
    sampler, sampled = run.actor._sampler, []
    denoised = sampler._denoised

    def watched(*args: object, **options: object) -> tuple[torch.Tensor, ...]:
        sampled.append(denoised(*args, **options))
        return sampled[-1]

    monkeypatch.setattr(sampler, "_denoised", watched)
    [group] = await run.groups(run.prompts(1), 3)
    cached = torch.stack([logprobs for *_, logprobs in sampled], 1).flatten(1).numpy()
    recorded = np.stack([t.behavior_logprobs for t in group.trajectories])
    assert cached.shape == recorded.shape == (6, 16 * 4)
    assert np.abs(cached - recorded).max() < GAP


async def test_a_sibling_does_not_depend_on_the_batch(config: Config) -> None:
    found = []
    for words in ((), ("sampler.flow.batch_size=4",)):
        [group] = await (run := await FlowRun(config(*words)).start()).groups(run.prompts(1), 1)
        found.append([t.actions.tokens for t in group.trajectories])
    np.testing.assert_allclose(found[0], found[1], atol=1e-4)
    assert len({tokens.tobytes() for tokens in found[0]}) == 6


async def test_windows_records_and_evaluations(config: Config) -> None:
    words = ("sampler.flow.window_size=2", "sampler.flow.latents=bfloat16", "sampler.image_patches.normalise=true")
    run = await FlowRun(config(*words)).start()
    [group] = await run.groups(run.prompts(1), 1)
    actions = group.trajectories[0].actions
    assert isinstance(actions, PatchActions) and actions.num_steps == 16 * 2 and actions.latents.dtype == np.uint16
    np.testing.assert_allclose(actions.token_values.mean(-1), 0, atol=0.01)
    [read] = from_batch(to_batch(group, [None] * 6)).group.trajectories[:1]
    for one, other in zip(read.actions.content(), actions.content(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert (await step(run, 1))["logprob_gap_max"] == 0
    [still] = await run.groups(run.prompts(1), 1, temperature=0.0)
    assert not still.trajectories[0].behavior_logprobs.any()
    assert Image.open(io.BytesIO(still.trajectories[0].response.images[0])).size == (16, 16)


async def test_a_canary_proves_a_push_and_the_export_is_the_trained_model(tmp_path: Path, config: Config) -> None:
    run = await FlowRun(config(*LORA)).start()
    [prompt] = run.prompts(1)
    before = await run.actor.prompt_logprobs(prompt)
    await step(run, 1)
    await step(run, 2)
    after = await run.actor.prompt_logprobs(prompt)
    np.testing.assert_allclose(after, run.learner.sequence_logprobs(prompt), atol=GAP)
    assert np.abs(after - before).max() > 1e-4
    run.learner.export(tmp_path / "policy")
    assert (tmp_path / "policy" / "vae" / "config.json").is_file()
    again = await FlowRun(config(f"policy.model={tmp_path / 'policy'}")).start()
    np.testing.assert_allclose(await again.actor.prompt_logprobs(prompt), after, atol=GAP)


async def test_the_kernel_of_vrl_and_the_kl_term(config: Config) -> None:
    vrl = ("sampler.flow.kernel=vrl", "sampler.flow.window_start=3")
    assert (await step(await FlowRun(config(*vrl)).start(), 1))["logprob_gap_max"] < 1e-4  # sums of 16 numbers
    run = await FlowRun(config(*LORA, "algorithm.kl.coef=0.1", "sampler.flow.guidance=2")).start()
    first, second = [await step(run, version) for version in (1, 2)]
    assert abs(first["kl"]) < 1e-9 < 1e-8 < second["kl"]


async def test_the_warm_start_explains_images(one_thread: None, tmp_path: Path) -> None:
    write_glyphs(tmp_path / "data")
    words = ("learner=single", "resources.learner.num_workers=1", "warm_start.text_dropout=0.3")
    own = (f"policy.model={tmp_path / 'model'}", f"data.path={tmp_path / 'data'}", f"folder={tmp_path / 'runs'}")
    found = load_config(["experiment=nextstep_ocr", "sampler.flow.guidance=2", *own, *words])
    run = await FlowRun(found, writes=False).start()
    examples, prompts = _examples(run.prepared), run.prompts(8)
    checks = at_hand([await examples.checked(prompt, n) for n, prompt in enumerate(prompts)])
    assert run.learner.answer_accuracy(checks) < 0.05, "the output of the head begins at 0"
    rows = [await examples.taught(prompts[0], seed) for seed in range(60)]
    assert len({row.sequence.num_tokens for row in rows}) == 2, "some rows have the negative prompt"
    for number in range(25):
        batch = [await examples.taught(prompts[n % 8], 16 * number + n) for n in range(16)]
        run.learner.supervised_step(at_hand(batch))
    assert run.learner.answer_accuracy(checks) > 0.3


def test_what_is_trained(config: Config) -> None:
    run = FlowRun(config())
    run.learner.connect("")
    frozen = {name for name, p in run.learner.policy.model.named_parameters() if not p.requires_grad}
    assert frozen == {"lm_head.weight"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("sampler.temperature=0.5",), r"set sampler\.temperature=1"),
        (("sampler.flow.num_frames=5",), r"set sampler\.flow\.num_frames=1"),
        (("sampler.flow.window_end=9",), r"set 0 <= window_start < window_end <= 4"),
        (("sampler.flow.kernel=vrl",), r"sampler\.flow\.window_start=3 window_end=4"),
        (("sampler.flow.kernel=vrl", "sampler.flow.window_start=3", "sampler.image_patches.shift=2"), "shift=1"),
        (("algorithm=diffusion_nft",), r"set sampler=flow, or algorithm\.loss=ppo_clip"),
        (("algorithm.kl.coef=0.1",), r"set policy\.lora\.rank above 0"),
        (("sampler.image_tokens.guidance=3",), r"is not read with sampler\.kind=image_patches"),
    ],
)
def test_what_cannot_be_done_is_refused(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        patch_config(tmp_path, *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("sampler.flow.height=18",), "each side must be a multiple of 4"),
        (
            ("sampler.max_model_len=16", "data.max_prompt_tokens=8", "sampler.max_tokens=8"),
            "has no room for the 16 tokens",
        ),
        (("policy=tiny_qwen3", "policy.model=OTHER"), "draws no images, as sampler.kind=image_patches asks"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(
    tmp_path: Path, config: Config, words: tuple[str, ...], message: str
) -> None:
    found = config(*(word.replace("OTHER", str(tmp_path / "other")) for word in words))
    with pytest.raises((ValueError, PreflightError), match=message):
        prepare(found, lambda value: value)

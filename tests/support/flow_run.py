"""A run of a tiny model that makes images, in this process: prompts, a sampler, a learner, a reward of images."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import SD3Transformer2DModel
from fakes import make_trajectory
from PIL import Image

from mobula.actors.rollout.actor import RolloutActor
from mobula.actors.samplers.base import EngineSettings
from mobula.actors.samplers.flow import FlowSampler
from mobula.cluster.records.actions import LatentActions, to_bfloat16
from mobula.cluster.records.media import MediaHandle, MediaReader, ProcessedMedia
from mobula.cluster.records.partial_response import Attempt, SampledSequence
from mobula.cluster.records.trajectory import (
    FinishReason,
    MediaSpan,
    Prompt,
    Response,
    Reward,
    ScoredGroup,
    TrajectoryGroup,
    WeightSpan,
)
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.weight_sync.manifest import checkpoint_manifest
from mobula.configs.load import load_config
from mobula.configs.overrides import overridden
from mobula.configs.schema import RunConfig
from mobula.deploy.wiring.preparation import Prepared, prepare
from mobula.deploy.wiring.roles import engine_settings
from mobula.learner.learner import Learner
from mobula.learner.policies.flow.checkpoint import FlowCheckpoint
from mobula.learner.policies.flow.families import TRANSFORMER, flow_family_at
from mobula.learner.policies.flow.policy import CONDITION, Denoising
from mobula.learner.policies.flow.tiny import write_tiny_flow
from mobula.learner.policies.flow.tiny.patches import write_tiny_patches
from mobula.learner.policies.nextstep.model import NextStep

TEXTS = ("71", "a red cube", "8", "15", "42", "a street")

BUCKET_BYTES = 1 << 24

WORDS = (
    "policy=tiny_sd3", "sampler=flow", "learner=single", "resources.learner.num_workers=1",
    "resources.reference.num_workers=0", "algorithm.kl.coef=0", "algorithm.prompts_per_step=2",
    "algorithm.samples_per_prompt=6", "sampler.flow.height=32", "sampler.flow.width=32", "sampler.flow.num_steps=5",
    "sampler.flow.window_end=4", "sampler.flow.max_text_tokens=16", "learner.tokens_per_microbatch=8192",
    "learner.learning_rate=0.001", "learner.warmup_steps=0",
)  # fmt: skip

JANUS_WORDS = (
    "policy=tiny_janus", "sampler=image_tokens", "learner=single", "resources.learner.num_workers=1",
    "resources.reference.num_workers=0", "algorithm.kl.coef=0", "algorithm.prompts_per_step=4",
    "algorithm.samples_per_prompt=8", "learner.learning_rate=0.003", "learner.warmup_steps=0",
)  # fmt: skip

PATCH_WORDS = (
    "policy=tiny_nextstep", "sampler=image_patches", "learner=single", "resources.learner.num_workers=1",
    "resources.reference.num_workers=0", "algorithm=flow_grpo", "algorithm.prompts_per_step=2",
    "algorithm.samples_per_prompt=6", "sampler.flow.height=16", "sampler.flow.width=16", "sampler.flow.num_steps=4",
    "sampler.flow.window_end=4", "learner.learning_rate=0.003", "learner.warmup_steps=0",
)  # fmt: skip

REDNESS = '''
"""How much redder than green an image is."""

import io

import numpy as np
from PIL import Image


def score(request, **options):
    [image] = request.response.images
    pixels = np.asarray(Image.open(io.BytesIO(image))).astype(float) / 255
    return float(pixels[..., 0].mean() - pixels[..., 1].mean())
'''


def write_texts(folder: Path) -> Path:
    """A data set whose questions are what images should show."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"id": f"t{n}", "question": text, "answer": text} for n, text in enumerate(TEXTS)]
    for split in ("train", "validation", "test"):
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder


def flow_config(folder: Path, *words: str) -> RunConfig:
    """A run whose model, data and results are below `folder`."""
    return load_config(overridden([*WORDS, *_folders(folder)], words))


def janus_config(folder: Path, *words: str) -> RunConfig:
    """The same of a model that draws token by token."""
    return load_config(overridden([*JANUS_WORDS, *_folders(folder)], words))


def patch_config(folder: Path, *words: str) -> RunConfig:
    """The same of a model that draws continuous tokens."""
    return load_config(overridden([*PATCH_WORDS, *_folders(folder)], words))


def _folders(folder: Path) -> tuple[str, ...]:
    return (f"policy.model={folder / 'model'}", f"data.path={folder / 'texts'}", f"folder={folder / 'runs'}")


def redness(image: bytes) -> float:
    """How much redder than green and blue an image is on average, in levels of 0 to 1."""
    pixels = np.asarray(Image.open(io.BytesIO(image)).convert("RGB")).astype(float) / 255
    return float(pixels[..., 0].mean() - pixels[..., 1:].mean())


class FlowRun:
    """Learner and rollout actor, which get on without Ray."""

    def __init__(self, config: RunConfig, *, writes: bool = True) -> None:
        self.config = config
        if writes:
            write_texts(config.data.path)
        self.prepared: Prepared = prepare(config, lambda value: value)
        self.actor = RolloutActor(config.sampler.kind, engine_settings(self.prepared, 0), object_timeout_s=5)
        self.learner = Learner(config, 0, 1, self.prepared.processor.media_token_ids)

    async def start(self) -> FlowRun:
        await self.actor.start()
        self.learner.connect("")
        await self.push()
        return self

    def prompts(self, num: int) -> list[Prompt]:
        rows = self.prepared.usable("train").rows
        return [self.prepared.processor.prepare(rows[n], f"0/{n}/{rows[n].sample_id}") for n in range(num)]

    async def groups(self, prompts: Sequence[Prompt], seed: int, *, temperature: float = 1.0) -> list[TrajectoryGroup]:
        """What the actor samples now."""
        num = self.config.algorithm.samples_per_prompt
        settings = [SamplingSettings(num, temperature, 1, seed).for_prompt(prompt.prompt_id) for prompt in prompts]
        return [
            (await self.actor.generate(p, s, Attempt(f"{seed}/{p.prompt_id}")))[0]
            for p, s in zip(prompts, settings, strict=True)
        ]

    async def push(self) -> None:
        """Bring the learner's weights to the actor."""
        version, buckets = self.learner.export_weights(BUCKET_BYTES)
        await self.actor.check_manifest(self.learner.manifest())
        await self.actor.load_weights(self.learner.manifest(), BUCKET_BYTES, buckets, version)

    async def step(self, version: int) -> dict[str, float]:
        """One step of training on `redness`, and a push; returns the learner's metrics and the mean reward."""
        groups = await self.groups(self.prompts(self.config.algorithm.prompts_per_step), version)
        scored = [
            ScoredGroup(g.summary(), g, tuple(Reward(redness(t.response.images[0])) for t in g.trajectories))
            for g in groups
        ]
        report = self.learner.update(scored, version)
        await self.push()
        mean = float(np.mean([reward.value for group in scored for reward in group.rewards]))
        return {**report.metrics, "reward": mean}


CPU = torch.device("cpu")

NO_IDS = np.empty(0, dtype=np.int32)

DENOISING = Denoising(32, 32, 6, 4.5, "flow_grpo", 0.7, 0, 5, "float32")

SETTINGS = SamplingSettings(num_samples=5, temperature=1.0, max_tokens=1, seed=3)


def write_loud_sd3(folder: Path, seed: int = 0) -> Path:
    """The tiny model with matrices of a larger deviation."""
    return made_loud(write_tiny_flow("sd3", folder, seed=seed), seed)


def made_loud(folder: Path, seed: int = 0) -> Path:
    """The Stable Diffusion 3 in `folder` with matrices of a larger deviation, so that every layer matters."""
    model = SD3Transformer2DModel.from_pretrained(folder, subfolder=TRANSFORMER)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.08, generator=generator)
    model.save_pretrained(folder / TRANSFORMER)
    return folder


def made_loud_patches(folder: Path, seed: int = 0) -> Path:
    """A tiny model of continuous tokens in `folder`, with matrices of a larger deviation."""
    model, generator = NextStep.from_pretrained(write_tiny_patches(folder)), torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.05, generator=generator)
    model.save_pretrained(folder)
    return folder


def encoded_prompts(folder: Path, texts: Sequence[str], *, with_negative: bool = True) -> list[Prompt]:
    """Prompts with encoded texts as media, and the empty text as the negative prompt."""
    family, pipeline = flow_family_at(folder), FlowCheckpoint(str(folder)).encoder()

    def medium(text: str) -> MediaHandle:
        encoded = family.encode(pipeline, text, 32)
        processed = ProcessedMedia(CONDITION, {k: t.detach().numpy() for k, t in encoded.items()})
        return MediaHandle(f"text {text}", CONDITION, processed.num_bytes, processed, text)

    negatives = (medium(""),) if with_negative else ()
    spans = (MediaSpan(0, 0),) * (1 + len(negatives))
    return [Prompt(f"0/0/{t}", t, t, NO_IDS, NO_IDS, (medium(t), *negatives), spans) for t in texts]


async def flow_sampler(folder: Path, denoising: Denoising = DENOISING, **own: Any) -> FlowSampler:
    """A started sampler."""
    settings = EngineSettings(
        model=str(folder), dtype="float32", device="cpu", seed=0, max_num_seqs=8, kv_cache_bytes=1,
        sampler=load_config(["experiment=digits"]).sampler, tensor_parallel=1,
        keeps_kv_cache=False, sleep_level=0, reports_load=True, banned_ids=(), stop_ids=(), pad_id=0,
        expected=checkpoint_manifest(folder / TRANSFORMER, "float32"), has_unpushed=False, adapters=None,
        denoising=denoising,
    )  # fmt: skip
    sampler = FlowSampler(replace(settings, **own))
    await sampler.start()
    return sampler


async def sample(sampler: FlowSampler, prompt: Prompt, settings: SamplingSettings = SETTINGS) -> list[SampledSequence]:
    """A group of one prompt."""
    media = MediaReader(timeout_s=1, max_items=8).read(prompt.media)
    return await sampler.sample(prompt, media, replace(settings), Attempt("r0"), lambda *_: None)


SIGMAS = np.array([1.0, 0.9, 0.6, 0.2, 0.0], dtype=np.float32)


def latent_actions(seed: int, *, first: int = 0, num_steps: int = 3, dtype: type = np.float32) -> LatentActions:
    """Random latents [T + 1, 4, 2, 2] of a window of the schedule `SIGMAS`; of uint16, the bits of bfloat16."""
    numbers = np.random.default_rng(seed).normal(size=(num_steps + 1, 4, 2, 2))
    latents = to_bfloat16(numbers) if dtype is np.uint16 else numbers.astype(dtype)
    index = np.arange(first, first + num_steps, dtype=np.int32)
    return LatentActions(latents, index, 1000 * SIGMAS[index], SIGMAS)


def sampled(actions: LatentActions) -> SampledSequence:
    """A finished response of these steps with an image."""
    spans = (WeightSpan(2, 0, actions.num_steps),)
    logprobs = -np.arange(actions.num_steps, dtype=np.float32)
    return SampledSequence(actions, logprobs, spans, FinishReason.STOP, (b"png",))


def condition(name: str) -> MediaHandle:
    """An encoded prompt: one row of each argument."""
    rng = np.random.default_rng(len(name))
    inputs = {"encoder_hidden_states": rng.normal(size=(1, 3, 8)).astype(np.float32)}
    medium = ProcessedMedia("condition", inputs)
    return MediaHandle(f"condition-{name}", "condition", medium.num_bytes, medium, name)


def latent_prompt(text: str, negative: str | None = None) -> Prompt:
    """A prompt without tokens whose text is encoded, and with `negative` that of another text."""
    media = tuple(condition(t) for t in (text, negative) if t is not None)
    spans = (MediaSpan(0, 0),) * len(media)
    return Prompt(f"0/0/{text}", text, text, NO_IDS, NO_IDS, media, spans, metadata={"target": text})


def latent_group(prompt: Prompt, siblings: Sequence[LatentActions]) -> TrajectoryGroup:
    """Siblings with an image each."""
    made = []
    for n, actions in enumerate(siblings):
        logprobs = -np.arange(actions.num_steps, dtype=np.float32)
        response = Response("", actions.num_steps, is_truncated=False, images=(b"png",))
        sibling = make_trajectory(f"{prompt.prompt_id}#{n}", (0,) * actions.num_steps)
        made.append(replace(sibling, actions=actions, behavior_logprobs=logprobs, response=response))
    return TrajectoryGroup(prompt, tuple(made))


def assert_same_actions(read: LatentActions, written: LatentActions) -> None:
    """Every array's type, shape and values."""
    for name in ("latents", "step_index", "timesteps", "sigmas"):
        array, expected = getattr(read, name), getattr(written, name)
        assert (array.dtype, array.shape) == (expected.dtype, expected.shape), name
        np.testing.assert_array_equal(array, expected)

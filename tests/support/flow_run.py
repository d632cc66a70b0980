"""A run of a tiny model that makes images, in this process: prompts, a sampler, a learner, a reward of images."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from mobula.actors.rollout.actor import RolloutActor
from mobula.cluster.records.partial_response import Attempt
from mobula.cluster.records.trajectory import Prompt, Reward, ScoredGroup, TrajectoryGroup
from mobula.cluster.roles import SamplingSettings
from mobula.configs.load import load_config
from mobula.configs.overrides import overridden
from mobula.configs.schema import RunConfig
from mobula.deploy.wiring.preparation import Prepared, prepare
from mobula.deploy.wiring.roles import engine_settings
from mobula.learner.learner import Learner

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

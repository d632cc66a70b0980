"""Flow models: images a second of the sampler over the plain pipeline, a training step over a plain forward and
backward pass, and bytes of a trajectory.

The glyphs' model in one process: what the project adds to diffusers is largest where the model is small. The sampler
draws from Gaussians, scores each step and writes PNG files; the pipeline follows the ODE.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline

from benchmarks.harness.measure import QUICK, Claim, Effort, Findings, Measurements, interleave, share
from mobula.actors.rollout.actor import RolloutActor
from mobula.cluster.records.media import MediaReader
from mobula.cluster.records.partial_response import Attempt
from mobula.cluster.records.trajectory import Prompt, Reward, ScoredGroup, TrajectoryGroup
from mobula.cluster.roles import SamplingSettings
from mobula.configs.load import load_config
from mobula.configs.overrides import overridden
from mobula.configs.schema import RunConfig
from mobula.deploy.wiring.preparation import prepare
from mobula.deploy.wiring.roles import engine_settings
from mobula.learner.learner import Learner

NUM_IMAGES, QUICK_IMAGES = 16, 8  # of a group
NUM_CALLS = 3  # of one round
BUCKET_BYTES = 1 << 24
WORDS = (
    "experiment=glyphs_grpo",
    "learner=single",
    "resources.learner.num_workers=1",
    "resources.rollout.num_workers=1",
    "algorithm.prompts_per_step=1",
    "algorithm.num_minibatches=1",
    "sampler.flow.guidance=4.5",
)
IMAGES, STEPS = "images/s", "denoising steps/s"


@dataclass
class Bench:
    """A sampler, a learner and a pipeline of the same weights, and one prompt."""

    config: RunConfig
    actor: RolloutActor
    learner: Learner
    pipeline: Any
    prompt: Prompt
    num_images: int
    version: int = 0

    async def group(self, seed: int) -> TrajectoryGroup:
        settings = SamplingSettings(self.num_images, 1.0, 1, seed)
        return (await self.actor.generate(self.prompt, settings, Attempt(str(seed))))[0]

    async def sampled(self, round_number: int) -> float:
        started = time.perf_counter()
        for call in range(NUM_CALLS):
            await self.group(NUM_CALLS * round_number + call)
        return NUM_CALLS * self.num_images / (time.perf_counter() - started)

    async def piped(self, round_number: int) -> float:
        started = time.perf_counter()
        for _ in range(NUM_CALLS):
            self._pipe(self.num_images)
        return NUM_CALLS * self.num_images / (time.perf_counter() - started)

    async def piped_alone(self, round_number: int) -> float:
        started = time.perf_counter()
        for _ in range(self.num_images):
            self._pipe(1)
        return self.num_images / (time.perf_counter() - started)

    async def trained(self, round_number: int) -> float:
        """One step of the learner on a group, and nothing else: sampling is not in the time."""
        group = await self.group(1000 + round_number)
        rewards = tuple(Reward(float(n % 3)) for n in range(self.num_images))
        self.version += 1
        started = time.perf_counter()
        self.learner.update([ScoredGroup(group.summary(), group, rewards)], self.version)
        return self.num_images * group.trajectories[0].num_steps / (time.perf_counter() - started)

    async def passed(self, round_number: int) -> float:
        """A forward and backward pass of the plain transformer on as many rows, with guidance."""
        group = await self.group(1000 + round_number)
        actions = [trajectory.actions for trajectory in group.trajectories]
        latents = torch.from_numpy(np.concatenate([a.latents[:-1] for a in actions]))
        times = torch.from_numpy(np.concatenate([a.timesteps for a in actions]))
        conditions = [self._conditions(n, len(latents)) for n in range(2)]
        both = {name: torch.cat([conditions[1][name], conditions[0][name]]) for name in conditions[0]}
        model = self.pipeline.transformer
        started = time.perf_counter()
        found = model(
            hidden_states=torch.cat([latents, latents]), timestep=torch.cat([times, times]), return_dict=False, **both
        )[0]
        found.square().mean().backward()
        model.zero_grad()
        return len(latents) / (time.perf_counter() - started)

    @torch.no_grad()
    def _pipe(self, num: int) -> None:
        text, negative = (self._conditions(n, num) for n in range(2))
        flow = self.config.sampler.flow
        self.pipeline(
            prompt_embeds=text["encoder_hidden_states"],
            pooled_prompt_embeds=text["pooled_projections"],
            negative_prompt_embeds=negative["encoder_hidden_states"],
            negative_pooled_prompt_embeds=negative["pooled_projections"],
            guidance_scale=flow.guidance,
            num_inference_steps=flow.num_steps,
            height=flow.height,
            width=flow.width,
        )

    def _conditions(self, place: int, num: int) -> dict[str, torch.Tensor]:
        """The encoded prompt (0) or the negative one (1), in `num` rows."""
        medium = MediaReader(timeout_s=1, max_items=2).read(self.prompt.media)[place]
        return {n: torch.tensor(a).expand(num, *a.shape[1:]).contiguous() for n, a in medium.inputs.items()}


async def _bench(folder: Path, num_images: int, overrides: Sequence[str]) -> Bench:
    own = (f"policy.model={folder / 'model'}", f"data.path={folder / 'data'}", f"folder={folder / 'runs'}")
    words = [*WORDS, *own, f"algorithm.samples_per_prompt={num_images}"]
    config = load_config(overridden(words, overrides))
    prepared = prepare(config, lambda value: value)
    actor = RolloutActor("flow", engine_settings(prepared, 0), object_timeout_s=5)
    await actor.start()
    learner = Learner(config, 0, 1, ())
    learner.connect("")
    row = prepared.usable("train").rows[0]
    pipeline = DiffusionPipeline.from_pretrained(config.policy.model)
    pipeline.set_progress_bar_config(disable=True)
    return Bench(config, actor, learner, pipeline, prepared.processor.prepare(row, "0/0/x"), num_images)


async def _bytes(bench: Bench) -> dict[str, int]:
    """Of one trajectory as it is sampled: all its steps in float32, and a window of two in bfloat16."""
    whole = (await bench.group(0)).trajectories[0].actions
    config = bench.config
    flow = config.sampler.flow.model_copy(update={"latents": "bfloat16", "window_size": 2})
    sampler = config.sampler.model_copy(update={"flow": flow})
    prepared = prepare(config.model_copy(update={"sampler": sampler}), lambda value: value)
    actor = RolloutActor("flow", engine_settings(prepared, 0), object_timeout_s=5)
    await actor.start()
    group, *_ = await actor.generate(bench.prompt, SamplingSettings(1, 1.0, 1, 0), Attempt("short"))
    short = group.trajectories[0].actions
    assert (short.num_steps, short.latents.dtype.itemsize) == (2, 2), "a window of two steps, two bytes a number"
    return {"float32, all steps": whole.num_bytes, "bfloat16, window of 2": short.num_bytes}


def measure(effort: Effort, overrides: Sequence[str]) -> Findings:
    """All sides in turn."""
    torch.set_num_threads(1)
    return asyncio.run(_measure(effort, overrides))


async def _measure(effort: Effort, overrides: Sequence[str]) -> Findings:
    num_images = QUICK_IMAGES if effort == QUICK else NUM_IMAGES
    with tempfile.TemporaryDirectory() as folder:
        bench = await _bench(Path(folder), num_images, overrides)
        sides = {
            "sampler": bench.sampled,
            "pipeline": bench.piped,
            "pipeline, one by one": bench.piped_alone,
            "learner": bench.trained,
            "forward and backward": bench.passed,
        }
        found = await interleave(sides, effort)
        num_bytes = await _bytes(bench)
    units = {name: STEPS if name in ("learner", "forward and backward") else IMAGES for name in sides}
    series = {name: Measurements(name, units[name], values) for name, values in found.items()}
    small, large = sorted(num_bytes.values())
    claims = (
        Claim("images: sampler / pipeline", share(found["sampler"], found["pipeline"]), 0.9),
        Claim("images: sampler / pipeline, one by one", share(found["sampler"], found["pipeline, one by one"]), 1.5),
        Claim("steps: learner / forward and backward", share(found["learner"], found["forward and backward"]), 0.85),
        Claim("bytes: window of 2 in bfloat16 / all steps in float32", small / large, 0.25, at_least=False),
    )
    flow = bench.config.sampler.flow
    size = f"{flow.width}x{flow.height}"
    settings = {"num_images": num_images, "num_steps": flow.num_steps, "size": size, "bytes": num_bytes}
    return Findings(settings, series, claims)

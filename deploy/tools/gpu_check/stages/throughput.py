"""Tokens per second of sampler and learner, seconds of a step, peak memory and model FLOP utilisation."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import numpy as np
import torch

from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.trajectory import (
    FinishReason,
    Response,
    ScoredGroup,
    Trajectory,
    TrajectoryGroup,
    WeightSpan,
)
from mobula.deploy.tools.gpu_check.context import Context, Figures
from mobula.deploy.tools.gpu_check.roles import Model, open_checkpoint, scored
from mobula.learner.policies.tiny import write_checked
from mobula.learner.policies.tiny.text import write_small_text

# Dense bfloat16 FLOP/s of NVIDIA's data sheets, by a part of the card's name.
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12}
NUM_PROMPTS, NUM_TOKENS = {"cpu": 2, "cuda": 16}, {"cpu": 32, "cuda": 1024}  # of each response
NUM_IDS = 250  # every tokenizer has more
NUM_STEPS = 3  # the first one is not timed


def run(context: Context) -> Figures:
    """A model of random weights: of 0.36 billion parameters on a GPU, a tiny one on a CPU."""
    num_tokens = NUM_TOKENS[context.device]
    own = (
        "sampler=huggingface",
        f"sampler.max_tokens={num_tokens}",
        f"sampler.max_model_len={num_tokens + 256}",
        "learner.packing=true",
        "learner.tokens_per_microbatch=8192",
    )
    folder = context.folder / "measured"
    written = write_small_text(folder) if context.is_cuda else write_checked(folder)
    model = open_checkpoint(context, written, *own)
    return {**_learner(context, model, num_tokens), **asyncio.run(_sampler(model, num_tokens))}


def _learner(context: Context, model: Model, num_tokens: int) -> Figures:
    """Times steps on responses of `num_tokens` random tokens."""
    context.restart_peak()
    learner = model.learner()
    seconds, groups = [], _groups(model, NUM_PROMPTS[context.device], num_tokens)
    for version in range(1, NUM_STEPS + 1):
        started = time.perf_counter()
        report = learner.update(_at(groups, version - 1), version)
        context.synchronize()
        seconds.append(time.perf_counter() - started)
        assert report.metrics["skipped"] == 0 and report.metrics["grad_norm"] > 0
    learner.close()
    step_s = min(seconds[1:])
    trained = sum(t.num_steps + g.prompt.num_tokens for g in groups for t in g.trajectories)
    figures = {"step_s": step_s, "train_tokens_per_s": trained / step_s, **context.peak_figures()}
    return {**figures, **_utilisation(context, model, trained / step_s)}


def _utilisation(context: Context, model: Model, tokens_per_s: float) -> Figures:
    """6 FLOPs a parameter and token, over the card's; attention is not counted. Nothing for an unknown card."""
    name = torch.cuda.get_device_name() if context.is_cuda else ""
    peak = next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
    num_parameters = sum(int(np.prod(spec.shape)) for spec in model.manifest.tensors)
    found: dict[str, float | int | str] = {"parameters": num_parameters}
    return found if peak is None else {**found, "mfu": 6 * num_parameters * tokens_per_s / peak}


async def _sampler(model: Model, num_tokens: int) -> Figures:
    """Times the second group of a prompt."""
    actor = await model.actor()
    settings = replace(model.sampling(seed=0), max_tokens=num_tokens, num_samples=16)
    for _ in range(2):
        started = time.perf_counter()
        group = await actor.sample_apart(model.prompts[0], settings)
        seconds = time.perf_counter() - started
    await actor.close()
    return {"sample_tokens_per_s": sum(t.num_steps for t in group.trajectories) / seconds}


def _groups(model: Model, num: int, num_tokens: int) -> list[TrajectoryGroup]:
    """Groups of responses of random tokens, as an engine of version 0 would report them."""
    random = np.random.default_rng(0)

    def trajectory(name: str) -> Trajectory:
        ids = random.integers(0, NUM_IDS, num_tokens).astype(np.int32)
        logprobs = np.full(num_tokens, -np.log(NUM_IDS), dtype=np.float32)
        spans, everything = (WeightSpan(0, 0, num_tokens),), np.ones(num_tokens, dtype=bool)
        end = FinishReason.LENGTH
        return Trajectory(name, TokenActions(ids), logprobs, everything, spans, end, Response("", num_tokens, True))

    prompts = [replace(model.prompts[0], prompt_id=f"0/{n}/throughput") for n in range(num)]
    return [TrajectoryGroup(p, tuple(trajectory(f"{p.prompt_id}#{n}") for n in range(4))) for p in prompts]


def _at(groups: list[TrajectoryGroup], version: int) -> list[ScoredGroup]:
    """The groups as sampled by the weights of `version`."""

    def aged(trajectory: Trajectory) -> Trajectory:
        return replace(trajectory, weight_spans=(WeightSpan(version, 0, trajectory.num_steps),))

    return scored([replace(group, trajectories=tuple(map(aged, group.trajectories))) for group in groups])

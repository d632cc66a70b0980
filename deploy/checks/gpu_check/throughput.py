"""The stage of the GPU check that measures speed and memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.trajectory import (
    FinishReason,
    Response,
    ScoredGroup,
    Trajectory,
    TrajectoryGroup,
    WeightSpan,
)
from mobula.configs.load import load_config
from mobula.deploy.checks.gpu_check.roles import MIB, Context, Figures, Model, open_checkpoint, overrides, scored
from mobula.deploy.planning.memory import CONTEXT, TRAINING, worker_memory
from mobula.learner.policies.shapes import shape_of
from mobula.learner.policies.tiny import SMALL_TEXT, TEXT_MODELS

# Dense bfloat16 FLOP/s of NVIDIA's data sheets, by a part of the card's name.
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12}
NUM_PROMPTS, NUM_TOKENS = {"cpu": 2, "cuda": 16}, {"cpu": 32, "cuda": 1024}  # of each response
NUM_IDS = 250  # every tokenizer has more
NUM_SAMPLES = 4  # of each prompt
MOST_SAMPLED = 128  # tokens of a response, at some 30 ms each
NUM_STEPS = 3  # the first one is not timed
MOST_OF_PLAN = 1.15  # that torch may allocate


def check_throughput(context: Context) -> Figures:
    """Tokens per second of sampler and learner, seconds of a step, MFU, and the memory of the learner against
    `mobula plan`: 0.36 billion random parameters on a GPU, a tiny model on a CPU."""
    num_tokens = NUM_TOKENS[context.device]
    folder = context.folder / "measured"
    tiny = next(iter(TEXT_MODELS.values()))
    written = SMALL_TEXT(folder) if context.is_cuda else tiny(folder)
    own = (
        "sampler=huggingface",
        f"sampler.max_tokens={num_tokens}",
        f"sampler.max_model_len={num_tokens + 256}",
        f"algorithm.prompts_per_step={NUM_PROMPTS[context.device]}",
        f"algorithm.samples_per_prompt={NUM_SAMPLES}",
        "learner.packing=true",
        "learner.tokens_per_microbatch=8192",
    )
    model = open_checkpoint(context, written, *own)
    groups = _random_groups(model, NUM_PROMPTS[context.device], num_tokens)
    planned = _planned_bytes(context, model, own)
    allocated = allocated_bytes(context, lambda: _step_seconds(context, model, groups))
    assert allocated <= MOST_OF_PLAN * planned, (
        f"the learner allocates {allocated / MIB:.4g} MiB, of which mobula plan says {planned / MIB:.4g}"
    )
    memory = {"planned_mib": planned / MIB, "allocated_mib": allocated / MIB, "allocated_of_plan": allocated / planned}
    return {**_learner_figures(context, model, groups), **memory, **asyncio.run(_sampler_figures(model, num_tokens))}


def _planned_bytes(context: Context, model: Model, own: tuple[str, ...]) -> int:
    """`mobula plan`'s learner while it trains on rows as long as those of `_groups`, without the CUDA context."""
    longest = f"data.max_prompt_tokens={model.prompts[0].num_tokens}"
    config = load_config(context.words(*overrides(*own), f"policy.model={model.folder}", longest))
    parts = worker_memory(config, shape_of(str(model.folder)), "learner").device[TRAINING]
    return sum(size for name, size in parts.items() if name != CONTEXT)


def allocated_bytes(context: Context, work: Callable[[], object]) -> int:
    """The most that torch has allocated at one time for `work`: by its own count on a GPU, on a CPU by adding up what
    the profiler records of its allocator, operation by operation."""
    if context.is_cuda:
        before = torch.cuda.memory_allocated()
        context.restart_peak()
        work()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    now = most = 0
    for event in sorted(recorded.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        now += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, now)
    return most


def _step_seconds(context: Context, model: Model, groups: list[TrajectoryGroup]) -> list[float]:
    learner, seconds = model.learner(), []
    for version in range(1, NUM_STEPS + 1):
        started = time.perf_counter()
        report = learner.update(_at(groups, version - 1), version)
        context.synchronize()
        seconds.append(time.perf_counter() - started)
        assert report.metrics["skipped"] == 0 and report.metrics["grad_norm"] > 0
    learner.close()
    return seconds


def _learner_figures(context: Context, model: Model, groups: list[TrajectoryGroup]) -> Figures:
    step_s = min(_step_seconds(context, model, groups)[1:])
    trained = sum(t.num_steps + g.prompt.num_tokens for g in groups for t in g.trajectories)
    rate = trained / step_s
    return {"step_s": step_s, "train_tokens_per_s": rate, **_utilisation(context, model, rate)}


def _utilisation(context: Context, model: Model, tokens_per_s: float) -> Figures:
    """6 FLOPs a parameter and token, over the card's; attention is not counted. Nothing for an unknown card."""
    name = torch.cuda.get_device_name() if context.is_cuda else ""
    peak = next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
    num_parameters = sum(int(np.prod(spec.shape)) for spec in model.manifest.tensors)
    utilisation: dict[str, float | int | str] = {"parameters": num_parameters}
    return utilisation if peak is None else {**utilisation, "mfu": 6 * num_parameters * tokens_per_s / peak}


async def _sampler_figures(model: Model, num_tokens: int) -> Figures:
    actor = await model.actor()
    settings = replace(model.sampling(seed=0), max_tokens=min(num_tokens, MOST_SAMPLED), num_samples=16)
    for _ in range(2):
        started = time.perf_counter()
        group = await actor.sample_apart(model.prompts[0], settings)
        seconds = time.perf_counter() - started
    await actor.close()
    return {"sample_tokens_per_s": sum(t.num_steps for t in group.trajectories) / seconds}


def _random_groups(model: Model, num: int, num_tokens: int) -> list[TrajectoryGroup]:
    random = np.random.default_rng(0)

    def trajectory(name: str) -> Trajectory:
        ids = random.integers(0, NUM_IDS, num_tokens).astype(np.int32)
        logprobs = np.full(num_tokens, -np.log(NUM_IDS), dtype=np.float32)
        spans, everything = (WeightSpan(0, 0, num_tokens),), np.ones(num_tokens, dtype=bool)
        end = FinishReason.LENGTH
        return Trajectory(name, TokenActions(ids), logprobs, everything, spans, end, Response("", num_tokens, True))

    prompts = [replace(model.prompts[0], prompt_id=f"0/{n}/throughput") for n in range(num)]
    return [TrajectoryGroup(p, tuple(trajectory(f"{p.prompt_id}#{n}") for n in range(NUM_SAMPLES))) for p in prompts]


def _at(groups: list[TrajectoryGroup], version: int) -> list[ScoredGroup]:
    def aged(trajectory: Trajectory) -> Trajectory:
        return replace(trajectory, weight_spans=(WeightSpan(version, 0, trajectory.num_steps),))

    return scored([replace(group, trajectories=tuple(map(aged, group.trajectories))) for group in groups])

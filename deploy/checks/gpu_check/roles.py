"""Input and result of a stage, and its roles: engine, learner and what compares them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from mobula.actors.processors.chat import ChatProcessor
from mobula.actors.rollout.actor import RolloutActor
from mobula.actors.samplers.base import engine_settings
from mobula.cluster.records.media import MediaStore
from mobula.cluster.records.trajectory import Prompt, Reward, ScoredGroup, TrajectoryGroup
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.runtime.placement import PlacedWorker
from mobula.cluster.weight_sync.changes import PushedChanges, VersionStep
from mobula.cluster.weight_sync.interfaces import Receiver
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.cluster.weight_sync.tolerance import Tolerance
from mobula.cluster.weight_sync.transport import Rendezvous
from mobula.cluster.weight_sync.weight_sync import WeightSync
from mobula.configs.load import load_config
from mobula.configs.overrides import SMALL_EXAMPLE
from mobula.configs.schema import RunConfig
from mobula.deploy.checks.parity import cases
from mobula.learner.learner import Learner
from mobula.learner.policies.checkpoint import stored_model
from mobula.learner.policies.tiny import write_checked

if TYPE_CHECKING:
    from mobula.actors.processors.flow import FlowProcessor

Figures = Mapping[str, float | int | str]
"""Measured numbers by name, for the table and the JSON file."""
ONE_PROCESS = ("learner=single", "resources.learner.num_workers=1", "algorithm.kl.coef=0", "warm_start=none")
MIB = 1 << 20


class NotHereError(Exception):
    """This machine lacks what the stage needs; the message names it."""


@dataclass(frozen=True)
class Context:
    """The device that is checked, and a folder for the files of one stage."""

    device: str  # cpu | cuda
    folder: Path

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def num_gpus(self) -> int:
        return torch.cuda.device_count() if self.is_cuda else 0

    def words(self, *own: str) -> tuple[str, ...]:
        """Overrides of a run in one process on the device; of two words for one key the later one holds."""
        preset = ("resources=gpu_1",) if self.is_cuda else ("resources=laptop",)
        named = {override.partition("=")[0]: override for override in (*preset, *ONE_PROCESS, *own)}
        return tuple(named.values())

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def restart_peak(self) -> None:
        self.synchronize()
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()

    def peak_figures(self) -> Figures:
        """Peak memory of torch on the GPU since `restart_peak`; nothing on a CPU."""
        return {"peak_mib": torch.cuda.max_memory_allocated() // MIB} if self.is_cuda else {}


NUM_SAMPLES = 4
MAX_TOKENS = 8

ROLES_WORDS = (
    f"experiment={SMALL_EXAMPLE}",
    "policy.tiny=none",
    "data.path=unused",
    "sampler.max_model_len=512",
    "sampler.max_images_per_prompt=3",
    "data.max_prompt_tokens=256",
    "weight_sync.bucket_bytes=1048576",
    "weight_sync.timeout_s=60",
    "learner.warmup_steps=0",
)

ENGINE = (
    "sampler.vllm.kv_cache_bytes=268435456",
    "sampler.vllm.max_num_seqs=16",
    "sampler.vllm.gpu_memory_fraction=0.3",  # no plan books it, and the learner is on the same GPU
)


class LocalActor(RolloutActor):
    name = "rollout/0"

    async def weight_version(self) -> int:
        return await self.ping()


class LocalSender:
    """Sender interface of a local learner; runs on a thread, so that receivers can answer meanwhile."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.num_opened = 0
        self.num_sent = 0
        self.num_exported = 0

    async def manifest(self) -> Manifest:
        return self.learner.manifest()

    async def open_transfer(self, epoch: int, num_receivers: int) -> Rendezvous:
        self.num_opened += 1
        return self.learner.open_transfer(epoch, num_receivers)

    async def join_transfer(self, rendezvous: Rendezvous) -> None:
        await asyncio.to_thread(self.learner.join_transfer, rendezvous)

    async def leave_transfer(self, epoch: int) -> None:
        self.learner.leave_transfer(epoch)

    async def send_weights(
        self, bucket_bytes: int, epoch: int, step: VersionStep | None = None
    ) -> PushedChanges | None:
        self.num_sent += 1
        return await asyncio.to_thread(self.learner.send_weights, bucket_bytes, epoch, step)

    async def export_weights(self, bucket_bytes: int) -> tuple[int, list[np.ndarray]]:
        self.num_exported += 1
        return await asyncio.to_thread(self.learner.export_weights, bucket_bytes)

    async def sequence_logprobs(self, prompt: Prompt, num_copies: int = 1) -> np.ndarray:
        return await asyncio.to_thread(self.learner.sequence_logprobs, prompt, num_copies)


class OneMember:
    """The only receiver of pushes; its loss fails the push."""

    def __init__(self, actor: LocalActor) -> None:
        self._actor = actor

    def receivers(self) -> Sequence[LocalActor]:
        return (self._actor,)

    def announced(self, version: int) -> None:
        pass

    def synced(self, receiver: Receiver, version: int) -> None:
        pass

    def published(self, version: int) -> None:
        pass

    def lose(self, receiver: Receiver, error: Exception) -> None:
        raise error


@dataclass(frozen=True)
class Model:
    """A checkpoint, its configuration, and prompts without and, if its family takes them, with images."""

    config: RunConfig
    folder: Path
    manifest: Manifest
    processor: ChatProcessor | FlowProcessor
    prompts: tuple[Prompt, ...]

    @property
    def bucket_bytes(self) -> int:
        return self.config.weight_sync.bucket_bytes

    def learner(self) -> Learner:
        learner = Learner(self.config, 0, 1, self.processor.media_token_ids)
        learner.connect("")
        return learner

    async def actor(self) -> LocalActor:
        settings = engine_settings(self.config, self.folder, self.manifest, self.processor, 0)
        actor = LocalActor(self.config.sampler.kind, settings, object_timeout_s=self.config.timeouts.object_s)
        await actor.start()
        return actor

    def weight_sync(self, sender: LocalSender, actor: LocalActor) -> WeightSync:
        settings, dtype = self.config.weight_sync, self.config.resources.dtype
        return WeightSync(
            sender,
            OneMember(actor),
            bucket_bytes=settings.bucket_bytes,
            wave_size=0,
            max_attempts=1,
            canary_interval=1,
            canary_tolerance=Tolerance(settings.canary_tolerance.of(dtype), settings.canary_share.of(dtype)),
            ranks_of_receiver=self.config.resources.rollout.tensor_parallel,
            probe=self.prompts[-1],
        )

    def sampling(self, seed: int) -> SamplingSettings:
        return SamplingSettings(NUM_SAMPLES, self.config.sampler.temperature, MAX_TOKENS, seed)


def overrides(*own: str) -> tuple[str, ...]:
    """Returns the overrides of a stage: those of all stages, sizes of vLLM where it samples, and its own."""
    return (*ROLES_WORDS, *(() if "sampler=huggingface" in own else ENGINE), *own)


def open_model(context: Context, *own: str) -> Model:
    """A tiny model, which takes images if the installed transformers can train it with them."""
    return open_checkpoint(context, write_checked(context.folder / "tiny"), *own)


def open_checkpoint(context: Context, folder: Path, *own: str) -> Model:
    config = load_config(context.words(*overrides(*own), f"policy.model={folder}"))
    store = MediaStore(lambda media: media, config.data.media_cache_bytes)
    processor = ChatProcessor.of(config, store)
    prompts = tuple(case.prompt for case in cases(processor, context.folder, 2).values())
    manifest = stored_model(folder).in_dtype(config.resources.dtype)
    return Model(config, folder, manifest, processor, prompts)


async def sample(model: Model, actor: LocalActor, seed: int) -> list[TrajectoryGroup]:
    return list(await asyncio.gather(*(actor.sample_apart(prompt, model.sampling(seed)) for prompt in model.prompts)))


def sampled_groups(model: Model) -> list[ScoredGroup]:
    """A step's groups of an engine that has the checkpoint's weights by a push of version 0."""

    async def of_engine() -> list[ScoredGroup]:
        learner, actor = model.learner(), await model.actor()
        try:
            await model.weight_sync(LocalSender(learner), actor).publish(0)
            return scored(await sample(model, actor, seed=0))
        finally:
            learner.close()
            await actor.close()

    return asyncio.run(of_engine())


def scored(groups: Sequence[TrajectoryGroup]) -> list[ScoredGroup]:
    """The groups with rewards of 0 and 1 in turn, so that every group trains."""
    rewards = tuple(Reward(float(n % 2)) for n in range(NUM_SAMPLES))
    return [ScoredGroup(group.summary(), group, rewards[: len(group.trajectories)]) for group in groups]


async def gap(model: Model, learner: Learner, actor: LocalActor) -> np.ndarray:
    """Absolute differences of the log-probs of learner and engine at the tokens of all prompts."""
    pairs = [(learner.sequence_logprobs(p), await actor.prompt_logprobs(p)) for p in model.prompts]
    return np.concatenate([np.abs(ours - theirs) for ours, theirs in pairs])


ENGINE_VARIABLES = {
    "HF_HUB_ENGINE_VARIABLES": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
    "TOKENIZERS_PARALLELISM": "false",
}


def set_engine_environment(config: RunConfig) -> None:
    """Sets the environment variables that vLLM reads at import. Call it before the import."""
    from mobula.deploy.host.session import engine_environment  # with Ray, which a machine that is checked may lack

    worker = PlacedWorker("rollout", 0, "here", 0, config.resources.rollout.num_gpus, 1, ())
    os.environ.update(ENGINE_VARIABLES | engine_environment(config, worker))

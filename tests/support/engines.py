"""Real rollout actors in processes of their own, a learner in this one, and what both are asked in contract tests."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from fakes import FixedMembers
from learner_data import tiny_config
from one_learner import copied
from PIL import Image
from sklearn.datasets import load_digits

from mobula.actors.datasets.rows import Row
from mobula.actors.processors.chat import ChatProcessor
from mobula.actors.rollout.actor import RolloutActor
from mobula.actors.rollout.client import RolloutClient
from mobula.actors.samplers.base import EngineSettings
from mobula.cluster.errors import ManifestError
from mobula.cluster.records.media import MediaReader, MediaStore
from mobula.cluster.records.trajectory import Prompt, Trajectory, TrajectoryGroup
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.rollout.in_flight import InFlightRequest, InFlightRequests
from mobula.cluster.runtime.object_store import fetch
from mobula.cluster.runtime.placement import PlacedWorker
from mobula.cluster.runtime.ray_actors import stop
from mobula.cluster.weight_sync.changes import VersionStep
from mobula.cluster.weight_sync.manifest import Bucket, Manifest, TensorSpec, checkpoint_manifest
from mobula.cluster.weight_sync.tolerance import Tolerance
from mobula.cluster.weight_sync.transport import TransferGroup, pack
from mobula.cluster.weight_sync.weight_sync import WeightSync
from mobula.configs.overrides import overridden
from mobula.configs.schema import RunConfig
from mobula.deploy.checks.gpu_check.roles import LocalSender
from mobula.deploy.host.session import engine_environment
from mobula.deploy.wiring.preparation import Prepared
from mobula.deploy.wiring.roles import engine_settings as run_engine_settings
from mobula.learner.learner import Learner
from mobula.learner.policies.adapters import AdapterPush
from mobula.learner.policies.batch import TokenSequence, collate
from mobula.learner.policies.head import Distribution
from mobula.learner.policies.token import PolicyOutput

TEMPERATURE = 0.8
LORA = ("policy.lora.rank=4", "policy.lora.alpha=6.0")
SIZES = ((), ((56, 56),), ((56, 56), (112, 84)))  # of the images of each prompt, (width, height)
CALLS_IN_FLIGHT = 64
EXACT = Tolerance(1e-5, 0.0)  # float32
CHUNK_TOKENS = 8  # responses of more tokens are reported while they grow
ENGINE_TIMEOUTS_S = {
    "start_s": 600.0, "rollout_s": 120.0, "sync_s": 60.0, "sign_s": 60.0, "probe_s": 60.0, "stop_s": 30.0,
}  # fmt: skip
OFFLINE = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A checkpoint, its processor, and a prompt with no, one and two images."""

    prepared: Prepared  # as for a run, but without data
    prompts: tuple[Prompt, ...]

    @property
    def config(self) -> RunConfig:
        return self.prepared.config

    @property
    def folder(self) -> Path:
        return self.prepared.model_folder

    @property
    def processor(self) -> ChatProcessor:
        return self.prepared.processor

    @property
    def distribution(self) -> Distribution:
        """What training samples from."""
        return Distribution(TEMPERATURE, self.processor.media_token_ids)

    @property
    def probe(self) -> Prompt:
        return self.prompts[1]


@dataclass(frozen=True)
class Engine:
    """A rollout actor whose engine is loaded, and the model that it serves."""

    kind: str
    model: Model
    client: RolloutClient
    in_flight_requests: InFlightRequests
    handle: Any

    async def sample(
        self, prompt: Prompt, *, num_samples: int = 4, max_tokens: int = 8, seed: int = 7
    ) -> TrajectoryGroup:
        """One group as training samples it."""
        return await self.generate(prompt, SamplingSettings(num_samples, TEMPERATURE, max_tokens, seed))

    async def decode(self, prompt: Prompt, *, max_tokens: int = 8) -> Trajectory:
        """One response as evaluation samples it: greedily."""
        group = await self.generate(prompt, SamplingSettings(1, 0.0, max_tokens, 0))
        return group.trajectories[0]

    async def serve(self, learner: Learner, version: int) -> None:
        """Take the learner's weights of now, as a late joiner does."""
        bucket_bytes = self.model.config.weight_sync.bucket_bytes
        _, buckets = learner.export_weights(bucket_bytes)
        await self.client.load_weights(learner.manifest(), bucket_bytes, buckets, version)

    async def close(self) -> None:
        await stop(self.handle, timeout_s=30, what=self.client.name)

    async def generate(self, prompt: Prompt, settings: SamplingSettings) -> TrajectoryGroup:
        """One group, from where an earlier attempt left it, by the in-flight request of the prompt."""
        reference, summary, _ = await self.client.generate(prompt, settings)
        [group] = await asyncio.to_thread(fetch, [reference], timeout_s=30, what="a group")
        assert group.summary() == summary
        return group


async def until_grown(in_flight: InFlightRequest, running: asyncio.Future[TrajectoryGroup]) -> None:
    """The next chunk has come, or the group is done."""
    known = in_flight.num_tokens
    while in_flight.num_tokens == known and not running.done():
        await asyncio.sleep(0.001)


class AlteredManifest(LocalSender):
    """A sender that would push something else."""

    def __init__(self, learner: Learner, alter: Callable[[tuple[TensorSpec, ...]], tuple[TensorSpec, ...]]) -> None:
        super().__init__(learner)
        self._alter = alter

    async def manifest(self) -> Manifest:
        manifest = self.learner.manifest()
        return replace(manifest, tensors=self._alter(manifest.tensors))


@dataclass(frozen=True)
class Stale:
    """One row of a tensor (one number of a vector) that keeps its value of before on the way."""

    name: str
    row: int
    before: torch.Tensor

    def packed(self, bucket: Bucket, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        tensor = tensors[self.name].clone()
        assert not torch.equal(tensor[self.row], self.before[self.row])
        tensor[self.row] = self.before[self.row]
        return pack(bucket, tensors | {self.name: tensor}, torch.empty(bucket.num_bytes, dtype=torch.uint8))


class StaleOnTheWay(LocalSender):
    """A sender of whose first push one row goes out stale."""

    def __init__(self, learner: Learner, stale: Stale, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(learner)
        self._stale = stale
        self._monkeypatch = monkeypatch

    async def send_weights(self, bucket_bytes: int, epoch: int, step: VersionStep | None = None) -> None:
        buckets = list(self.learner.manifest().buckets(bucket_bytes))
        [index] = [n for n, b in enumerate(buckets) if any(slot.spec.name == self._stale.name for slot in b.slots)]
        broadcast, tensors = TransferGroup.broadcast, copied(self.learner)

        def stale_broadcast(group: TransferGroup, buffer: torch.Tensor, what: str) -> None:
            is_meant = what.startswith(f"weight bucket {index} ")
            broadcast(group, self._stale.packed(buckets[index], tensors) if is_meant else buffer, what)

        with self._monkeypatch.context() as patch:
            patch.setattr(TransferGroup, "broadcast", stale_broadcast)
            await super().send_weights(bucket_bytes, epoch, step)


def dropped(tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """All but the third."""
    return tensors[:3] + tensors[4:]


VLLM_SIZES = ("sampler.vllm.kv_cache_bytes=134217728", "sampler.vllm.max_num_seqs=64")


def open_model(folder: Path, *overrides: str, sizes: Sequence[Sequence[tuple[int, int]]] = SIZES) -> Model:
    """The model of a checkpoint folder, with a prompt for each of `sizes`; its images are written beside it."""
    own = (
        f"sampler.temperature={TEMPERATURE}",
        *(() if "sampler=huggingface" in overrides else VLLM_SIZES),
        f"sampler.chunk_tokens={CHUNK_TOKENS}",
        "data.max_prompt_tokens=128",
        "weight_sync.bucket_bytes=1048576",
        "weight_sync.timeout_s=30",
    )
    config = tiny_config(folder, *overridden(own, overrides))
    store = MediaStore(lambda media: media, config.data.media_cache_bytes)
    device = config.resources.device
    processor = ChatProcessor(config.policy.model, config.data, config.sampler, store, keep_files=False, device=device)
    rows = [_row(n, of_prompt, folder.parent) for n, of_prompt in enumerate(sizes)]
    prompts = tuple(processor.prepare(row, f"0/{n}/{row.sample_id}") for n, row in enumerate(rows))
    checkpoint = checkpoint_manifest(folder, config.resources.dtype)
    return Model(Prepared(config, folder, checkpoint, processor, store, splits={}), prompts)


def start_actor(
    model: Model, kind: str, index: int, role: type[RolloutActor] = RolloutActor, limits_s: Mapping[str, float] = {}
) -> Engine:
    """A rollout actor that books no core of the cluster: it only needs a process with the environment of an engine.

    `role` may be a test's own, and `limits_s` has other timeouts of its client.
    """
    cores = sorted(os.sched_getaffinity(0))
    num_gpus = model.config.resources.rollout.num_gpus
    worker = PlacedWorker("rollout", index, "here", 0, num_gpus, 1, (cores[index % len(cores)],))
    own = {"PYTHONPATH": os.pathsep.join(sys.path)}  # where a test's role is found
    environment = OFFLINE | engine_environment(model.config, worker) | own
    actor = ray.remote(role).options(
        num_cpus=0, num_gpus=num_gpus, max_concurrency=CALLS_IN_FLIGHT, runtime_env={"env_vars": environment}
    )
    handle = actor.remote(kind, engine_settings(model, index), object_timeout_s=30)
    in_flight_requests = InFlightRequests(model.config.sampler.chunk_tokens)
    client = RolloutClient(
        handle, f"{kind}/{index}", in_flight_requests=in_flight_requests, **{**ENGINE_TIMEOUTS_S, **limits_s}
    )
    return Engine(kind, model, client, in_flight_requests, handle)


def engine_settings(model: Model, index: int = 0) -> EngineSettings:
    """Settings of a run; each engine also reports its load and takes pushes of weights and of the adapters of LORA."""
    policy, checkpoint = tiny_config(model.folder, *LORA).policy, model.prepared.checkpoint
    adapters = AdapterPush.of(model.folder, checkpoint, policy, model.config.resources.dtype)
    return replace(run_engine_settings(model.prepared, index), adapters=adapters, reports_load=True)


def new_learner(model: Model, *overrides: str) -> Learner:
    """A learner of one process that holds the checkpoint's weights."""
    config = tiny_config(model.folder, *overrides) if overrides else model.config
    learner = Learner(config, 0, 1, model.processor.media_token_ids)
    learner.connect("")
    return learner


def perturb(learner: Learner, seed: int, scale: float = 0.05, only: str = "") -> None:
    """Add noise to every weight whose checkpoint name starts with `only`."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in learner.outgoing.merged(learner.backend):
        if name.startswith(only):
            tensor.add_((torch.randn(tensor.shape, generator=generator) * scale).to(tensor.device))


def perturb_adapters(learner: Learner, seed: int, scale: float = 0.1) -> None:
    """Draw every A and B again."""
    generator = torch.Generator().manual_seed(seed)
    for _, factor in learner.outgoing.adapters(learner.backend):
        factor.copy_(torch.randn(factor.shape, generator=generator) * scale)


def restore(learner: Learner, weights: dict[str, torch.Tensor]) -> None:
    for name, tensor in learner.outgoing.merged(learner.backend):
        tensor.copy_(weights[name])


def learner_logprobs(
    learner: Learner, groups: Iterable[TrajectoryGroup], distribution: Distribution
) -> Iterator[tuple[Trajectory, np.ndarray]]:
    """Each trajectory with the learner's own log-probs of it, float32 [T]; all go through the policy in one batch."""
    pairs = [(group.prompt, trajectory) for group in groups for trajectory in group.trajectories]
    output = score(learner, [TokenSequence.of_response(p, t.actions.token_ids) for p, t in pairs], distribution)
    for row, (_, trajectory) in zip(output.logprobs.cpu().numpy(), pairs, strict=True):
        yield trajectory, row[: trajectory.num_steps]


def score(learner: Learner, sequences: Sequence[TokenSequence], distribution: Distribution) -> PolicyOutput:
    """The output of the learner's policy for these rows, in one batch."""
    with learner.backend.inference():
        batch = collate(sequences, MediaReader(timeout_s=1, max_items=8), learner.device)
        return learner.policy(batch, distribution)


def gaps(learner: Learner, model: Model, groups: Sequence[TrajectoryGroup]) -> np.ndarray:
    """Absolute log-prob difference of engine and learner at every token of `groups`."""
    found = learner_logprobs(learner, groups, model.distribution)
    return np.concatenate([np.abs(ours - trajectory.behavior_logprobs) for trajectory, ours in found])


def weight_sync(
    engine: Engine,
    sender: Any,
    *,
    canary_interval: int = 1,
    tolerance: Tolerance = EXACT,
    members: FixedMembers | None = None,
    ranks_of_receiver: int = 1,
    max_attempts: int = 1,
) -> WeightSync:
    """The push of the main job, from `sender` to the engine; by default a failed attempt is not repeated."""
    return WeightSync(
        sender, FixedMembers(engine.client) if members is None else members,
        bucket_bytes=engine.model.config.weight_sync.bucket_bytes, wave_size=0, max_attempts=max_attempts,
        canary_interval=canary_interval, canary_tolerance=tolerance, ranks_of_receiver=ranks_of_receiver,
        probe=engine.model.probe,
    )  # fmt: skip


async def probe_gap(engine: Engine, learner: Learner) -> float:
    """Largest log-prob difference of engine and learner over the tokens of all prompts."""
    found = [await engine.client.prompt_logprobs(prompt) for prompt in engine.model.prompts]
    expected = [learner.sequence_logprobs(prompt) for prompt in engine.model.prompts]
    return float(max(np.abs(a - b).max() for a, b in zip(found, expected, strict=True)))


async def sampled_gap(engine: Engine, learner: Learner) -> float:
    """Largest log-prob difference over sampled tokens, under the distribution that training samples from."""
    groups = await asyncio.gather(*(engine.sample(prompt) for prompt in engine.model.prompts))
    return float(gaps(learner, engine.model, groups).max())


async def refusal(engine: Engine, sender: LocalSender) -> str:
    """The error of a push that is refused for its manifest; nothing was opened or sent, and the engine is as it was."""
    with pytest.raises(ManifestError) as refused:
        await weight_sync(engine, sender).publish(1)
    assert (sender.num_opened, sender.num_sent) == (0, 0)
    assert await engine.client.weight_version() == 0
    return str(refused.value)


def _row(index: int, sizes: Sequence[tuple[int, int]], folder: Path) -> Row:
    paths = tuple(_image(folder / f"prompt{index}-{n}.png", index + n, size) for n, size in enumerate(sizes))
    return Row(f"r{index}", "<image>" * len(paths) + "Which digit is this?", "7", r"\boxed{7}", paths)


def _image(path: Path, index: int, size: tuple[int, int]) -> Path:
    """A handwritten digit as a file."""
    pixels = (load_digits().images[index] * 15).astype(np.uint8)  # [8, 8]
    Image.fromarray(pixels).resize(size).save(path)
    return path

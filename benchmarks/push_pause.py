"""Pushes into a vLLM engine: how long one takes, and how much later a generation ends that it falls into."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from safetensors.torch import load_file

from benchmarks.measure import Effort, Series
from benchmarks.stage import Stage, staged
from cluster.roles import SamplingSettings
from cluster.trajectory import Prompt
from cluster.weight_sync.manifest import Manifest, checkpoint_manifest
from configs.schema import RunConfig
from deploy.build import spawn_inference
from learner.policies.lora import adapter_manifest
from learner.weight_publisher import WeightPublisher

ROLES = ("rollout", "reward")
RECEIVER = 1
NUM_SAMPLES = 16
MAX_TOKENS = 512
REST_S = 0.2  # between two pushes into one generation
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class _Wire:
    """A transfer group between this process and the engine, and what is pushed over it."""

    manifest: Manifest
    publisher: WeightPublisher
    epoch: int


class _Pushes:
    """One engine that is pushed to, always the weights that it has: whatever it samples stays the same."""

    def __init__(self, stage: Stage, client: object) -> None:
        self._stage = stage
        self._client = client
        self._bucket_bytes = stage.prepared.config.weight_sync.bucket_bytes
        self._version = 0
        self._num_generated = 0

    async def connect(self, manifest: Manifest, tensors: dict[str, torch.Tensor], epoch: int) -> _Wire:
        resources = self._stage.prepared.config.resources
        publisher = WeightPublisher(
            manifest,
            lambda: ((spec.name, tensors[spec.name]) for spec in manifest.tensors),
            rank=0,
            device=torch.device(resources.device),
            transport=resources.transport,
            timeout_s=TIMEOUT_S,
        )
        rendezvous = publisher.open_transfer(epoch, num_receivers=1)
        await asyncio.gather(
            asyncio.to_thread(publisher.join_transfer, rendezvous), self._client.join_transfer(rendezvous, RECEIVER)
        )
        return _Wire(manifest, publisher, epoch)

    async def push(self, wire: _Wire) -> float:
        """Seconds of one push."""
        started = time.perf_counter()
        await asyncio.gather(
            asyncio.to_thread(wire.publisher.send, self._bucket_bytes, wire.epoch),
            self._client.receive_weights(wire.manifest, self._bucket_bytes, self._version),
        )
        self._version += 1
        return time.perf_counter() - started

    async def pause(self, wire: _Wire, prompt: Prompt) -> float:
        """Seconds by which one push delays a running generation: the delay by several, shared out among them."""
        undisturbed, num_tokens = await self._generate(prompt)
        running = asyncio.ensure_future(self._generate(prompt))
        num_pushes = 0
        await asyncio.sleep(REST_S)
        while not running.done():
            await self.push(wire)
            num_pushes += 1
            await asyncio.sleep(REST_S)
        disturbed, as_many = await running
        if abs(as_many - num_tokens) > 0.1 * num_tokens:
            raise ValueError(
                f"the pushes changed what is sampled: {num_tokens} tokens without them, {as_many} with them"
            )
        return (disturbed - undisturbed) / num_pushes

    async def _generate(self, prompt: Prompt) -> tuple[float, int]:
        """Under an id of its own each time: a response of a prompt ends once, and is scored when it does."""
        self._num_generated += 1
        prompt = replace(prompt, prompt_id=f"{prompt.prompt_id}/{self._num_generated}")
        started = time.perf_counter()
        _, summary, _ = await self._client.generate(prompt, SamplingSettings(NUM_SAMPLES, 1.0, MAX_TOKENS, 7))
        return time.perf_counter() - started, summary.num_tokens


async def into_engine(effort: Effort, config: RunConfig) -> dict[str, Series]:
    """Seconds of pushes and pauses, of the run's whole model and of adapters for it."""
    async with staged(config, ROLES) as stage:
        inference = spawn_inference(stage.prepared, stage.spawner, on_lost=lambda kind: None)
        await inference.rollouts.start()
        [client] = inference.rollouts.receivers()
        prompts = [prompt for [prompt] in stage.prompts(effort.warmups + effort.repeats, 1)]
        found = await _measured(_Pushes(stage, client), stage, prompts, effort)
        await inference.rollouts.close()
        for role in inference.watched:
            await role.close()
    return found


async def _measured(pushes: _Pushes, stage: Stage, prompts: Sequence[Prompt], effort: Effort) -> dict[str, Series]:
    config, folder = stage.prepared.config, stage.prepared.model_folder
    weights = checkpoint_manifest(folder, config.resources.dtype)
    tensors = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    adapters = adapter_manifest(weights, config.policy)
    nothing = {spec.name: torch.zeros(spec.shape) for spec in adapters.tensors}
    found = {}
    payloads = {"reload": ("weights", weights, tensors), "adapters": ("adapters", adapters, nothing)}
    for epoch, (name, (kind, manifest, values)) in enumerate(payloads.items(), start=1):
        wire = await pushes.connect(manifest, values, epoch)
        took = [await pushes.push(wire) for _ in range(effort.warmups + effort.repeats)][effort.warmups :]
        paused = [await pushes.pause(wire, prompt) for prompt in prompts][effort.warmups :]
        wire.publisher.close()
        size = f"{manifest.num_bytes} bytes of {kind}"
        found[f"engine_{name}"] = Series(f"push of {size} into an idle vLLM engine, pause to resume", "s", tuple(took))
        what = f"delay of a generation of {NUM_SAMPLES} samples by one push of {size}, caches computed anew included"
        found[f"pause_{kind}"] = Series(what, "s", tuple(paused))
    return found

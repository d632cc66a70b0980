"""Pushes into a vLLM engine: how long one takes, and how much later a generation ends that it falls into."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch
from safetensors.torch import load_file

from benchmarks.harness.measure import Effort, Measurements
from benchmarks.harness.stage import Stage, engines
from mobula.actors.rollout.client import RolloutClient
from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.weight_sync.manifest import Manifest, checkpoint_manifest
from mobula.configs.schema import RunConfig
from mobula.learner.policies.adapters import adapter_manifest
from mobula.learner.weight_publisher import WeightPublisher

RECEIVER = 1
SAMPLING = SamplingSettings(num_samples=16, temperature=1.0, max_tokens=512, seed=7)
REST_S = 0.2  # between two pushes into one generation
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Generation:
    """Groups that were sampled at once, and how often the engine was pushed to meanwhile."""

    seconds: float
    num_tokens: int
    num_pushes: int


@dataclass(frozen=True)
class Wire:
    """A transfer group between this process and the engine, and what is pushed over it."""

    manifest: Manifest
    publisher: WeightPublisher
    epoch: int


class Pushes:
    """One engine that is pushed to, always the weights that it has: what it samples stays the same."""

    def __init__(self, stage: Stage, client: RolloutClient) -> None:
        self._stage = stage
        self._client = client
        self._bucket_bytes = stage.prepared.config.weight_sync.bucket_bytes
        self._version = 0
        self._numbers = count()

    async def connect(self, manifest: Manifest, tensors: dict[str, torch.Tensor], epoch: int) -> Wire:
        resources, same_host = self._stage.prepared.config.resources, self._stage.prepared.config.weight_sync.same_host
        publisher = WeightPublisher(
            manifest,
            lambda: ((spec.name, tensors[spec.name]) for spec in manifest.tensors),
            rank=0,
            device=torch.device(resources.device),
            transport=resources.transport,
            timeout_s=TIMEOUT_S,
            same_host=same_host,
        )
        rendezvous = publisher.open_transfer(epoch, num_receivers=1)
        await asyncio.gather(
            asyncio.to_thread(publisher.join_transfer, rendezvous), self._client.join_transfer(rendezvous, RECEIVER)
        )
        return Wire(manifest, publisher, epoch)

    async def push(self, wire: Wire) -> float:
        """Seconds of one push."""
        started = time.perf_counter()
        await asyncio.gather(
            asyncio.to_thread(wire.publisher.send, self._bucket_bytes, wire.epoch),
            self._client.receive_weights(wire.manifest, self._bucket_bytes, self._version),
        )
        self._version += 1
        return time.perf_counter() - started

    async def generate(self, prompts: Sequence[Prompt], settings: Sequence[SamplingSettings]) -> Generation:
        """Groups under ids of their own each time: a response of a prompt ends once."""
        number = next(self._numbers)
        renamed = [replace(prompt, prompt_id=f"{prompt.prompt_id}/{number}") for prompt in prompts]
        started = time.perf_counter()
        groups = await asyncio.gather(*map(self._client.generate, renamed, settings))
        seconds = time.perf_counter() - started
        return Generation(seconds, sum(group.summary.num_tokens for group in groups), num_pushes=0)

    async def disturb(
        self, wire: Wire, prompts: Sequence[Prompt], settings: Sequence[SamplingSettings], rest_s: float
    ) -> Generation:
        """The same, while the engine is pushed to every `rest_s` seconds."""
        running = asyncio.ensure_future(self.generate(prompts, settings))
        num_pushes = 0
        await asyncio.sleep(rest_s)
        while not running.done():
            await self.push(wire)
            num_pushes += 1
            await asyncio.sleep(rest_s)
        return replace(await running, num_pushes=num_pushes)


def pause(undisturbed: Generation, disturbed: Generation) -> float:
    """Seconds by which one push delays a running generation: the delay by several, divided by their number.

    Raises:
        ValueError: the two did not sample the same.
    """
    without, with_pushes = undisturbed.num_tokens, disturbed.num_tokens
    if abs(with_pushes - without) > 0.1 * without:
        raise ValueError(f"the pushes changed what is sampled: {without} tokens without them, {with_pushes} with them")
    return (disturbed.seconds - undisturbed.seconds) / disturbed.num_pushes


async def into_engine(effort: Effort, config: RunConfig) -> dict[str, Measurements]:
    """Seconds of pushes and pauses, of the run's whole model and of adapters for it."""
    async with engines(config) as (stage, inference):
        [client] = inference.rollouts.receivers()
        rounds = stage.prompts(effort.warmups + effort.repeats, 1)
        return await _measured(Pushes(stage, client), stage, rounds, effort)


def served_weights(stage: Stage) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """The weights that the engines loaded: the checkpoint's manifest, and its tensors by name."""
    folder = stage.prepared.model_folder
    tensors = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    return checkpoint_manifest(folder, stage.prepared.config.resources.dtype), tensors


async def _measured(
    pushes: Pushes, stage: Stage, rounds: list[list[Prompt]], effort: Effort
) -> dict[str, Measurements]:
    weights, tensors = served_weights(stage)
    adapters = adapter_manifest(weights, stage.prepared.config.policy)
    nothing = {spec.name: torch.zeros(spec.shape) for spec in adapters.tensors}
    found = {}
    payloads = {"reload": ("weights", weights, tensors), "adapters": ("adapters", adapters, nothing)}
    for epoch, (name, (kind, manifest, values)) in enumerate(payloads.items(), start=1):
        wire = await pushes.connect(manifest, values, epoch)
        took = [await pushes.push(wire) for _ in range(effort.warmups + effort.repeats)][effort.warmups :]
        paused = []
        for prompts in rounds:
            undisturbed = await pushes.generate(prompts, [SAMPLING])
            paused.append(pause(undisturbed, await pushes.disturb(wire, prompts, [SAMPLING], REST_S)))
        wire.publisher.close()
        size = f"{manifest.num_bytes} bytes of {kind}"
        found[f"engine_{name}"] = Measurements(
            f"push of {size} into an idle vLLM engine, pause to resume", "s", tuple(took)
        )
        what = f"delay of a generation of {SAMPLING.num_samples} samples by one push of {size}, with recomputed caches"
        found[f"pause_{kind}"] = Measurements(what, "s", tuple(paused[effort.warmups :]))
    return found

"""Rollout overhead: samples/s through our rollout actor over raw `LLM.generate` on the same prompts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean

from benchmarks.apart import Peer
from benchmarks.measure import Claim, Effort, Findings, Series, interleave, rates
from benchmarks.raw_vllm import Generated, GenerateJob, RawPrompt, raw_engine, settings_of
from benchmarks.stage import private_ray, scratch_config, staged
from cluster.fleet import RolloutFleet
from cluster.trajectory import Prompt
from configs.schema import RunConfig
from deploy.build import spawn_inference
from deploy.preparation import Prepared

SETTINGS = ("resources.rollout.num_workers=1",)
ROLES = ("rollout", "reward")
NUM_PROMPTS = 64  # of one round
TARGET = 0.9
UNIT = "samples/s"


def measure(effort: Effort, overrides: Sequence[str]) -> Findings:
    """One engine of ours and a raw one, on the same core, by turns; the one that waits is idle."""
    with scratch_config(SETTINGS, overrides) as config, private_ray(config):
        return asyncio.run(_measure(effort, config))


async def _measure(effort: Effort, config: RunConfig) -> Findings:
    async with staged(config, ROLES) as stage:
        rounds = stage.prompts(effort.warmups + effort.repeats, NUM_PROMPTS)
        inference = spawn_inference(stage.prepared, stage.spawner, on_lost=lambda kind: None)
        await inference.rollouts.start()
        [worker] = stage.spawner.workers("rollout")
        with raw_engine(stage.prepared, worker) as engine:
            sides = _Sides(stage.prepared, inference.rollouts, engine, rounds)
            found = await interleave({"ours": sides.ours, "raw": sides.raw, "raw_processed": sides.processed}, effort)
        await inference.rollouts.close()
        for role in inference.watched:
            await role.close()
    return _findings(config, found, sides.lengths)


@dataclass
class _Sides:
    """What each side does in one round, and how long its responses were."""

    prepared: Prepared
    fleet: RolloutFleet
    engine: Peer[GenerateJob, Generated]
    rounds: list[list[Prompt]]
    lengths: dict[str, list[float]] = field(default_factory=lambda: {"ours": [], "raw": []})

    async def ours(self, round_number: int) -> float:
        prompts = self.rounds[round_number]
        settings = settings_of(self.prepared.config, prompts)
        started = time.perf_counter()
        groups = await asyncio.gather(*map(self.fleet.generate, prompts, settings))
        seconds = time.perf_counter() - started
        self.lengths["ours"] += [summary.num_tokens / summary.num_trajectories for _, summary in groups]
        return sum(summary.num_trajectories for _, summary in groups) / seconds

    async def raw(self, round_number: int) -> float:
        return self._generate(round_number, is_processed=False)

    async def processed(self, round_number: int) -> float:
        return self._generate(round_number, is_processed=True)

    def _generate(self, round_number: int, *, is_processed: bool) -> float:
        prompts = self.rounds[round_number]
        settings = settings_of(self.prepared.config, prompts)
        raw = [RawPrompt.of(prompt) for prompt in prompts]
        generated = self.engine.ask(GenerateJob(raw, settings, is_processed))
        lengths = [len(tokens) for siblings in generated.responses for tokens in siblings]
        self.lengths["raw"] += lengths
        return len(lengths) / generated.seconds


def _findings(config: RunConfig, found: dict[str, tuple[float, ...]], lengths: dict[str, list[float]]) -> Findings:
    what = {
        "ours": "Ray actor with AsyncLLM, through RolloutFleet; pictures processed beforehand, by the driver",
        "raw": "LLM.generate alone in a process on the same core, with the very parameters of ours; PIL pictures processed "
        "within the clock",
        "raw_processed": "the same, with the pictures in vLLM's processor cache; no prompt or embedding is cached",
    }
    series = {name: Series(what[name], UNIT, values) for name, values in found.items()}
    settings = {
        "prompts": NUM_PROMPTS,
        "samples_per_prompt": config.algorithm.samples_per_prompt,
        "max_tokens": config.sampler.max_tokens,
        "mean_response_tokens": {name: mean(values) for name, values in lengths.items()},
        "max_num_seqs": config.sampler.max_num_seqs,
        "threads": config.resources.rollout.num_threads,
    }
    claims = (
        Claim("ours / raw with processed pictures", rates(series["ours"], series["raw_processed"]), TARGET),
        Claim("ours / raw that processes pictures", rates(series["ours"], series["raw"])),
    )
    return Findings(settings, series, claims)

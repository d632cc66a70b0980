"""Rollout overhead: samples/s through our rollout actor over raw `LLM.generate` on the same prompts.

What an actor adds, it adds to a prompt, whatever the length of its responses: it is measured with the few tokens that
the digits job samples, and with as many as a short chain of thought has, which are reported while they are sampled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import mean

from benchmarks.harness.apart import Peer
from benchmarks.harness.measure import Claim, Effort, Findings, Measurements, Side, interleave, share
from benchmarks.harness.stage import engines, private_ray, scratch_config
from benchmarks.raw.raw_vllm import Generated, GenerateJob, RawPrompt, raw_engine, settings_of
from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.rollout.rollout_pool import RolloutPool
from mobula.configs.schema import RunConfig
from mobula.deploy.wiring.preparation import Prepared

SETTINGS = ("resources.rollout.num_workers=1",)
NUM_PROMPTS = 64  # of one round
LONG_TOKENS = 128  # of a response
ROUNDS = 3  # as many as other benchmarks have: a round of short responses takes half a second
TARGET = 0.9
UNIT = "samples/s"


def measure(effort: Effort, overrides: Sequence[str]) -> Findings:
    """One engine of ours and a raw one, on the same core, by turns; the one that waits is idle."""
    with scratch_config(SETTINGS, overrides) as config, private_ray(config):
        return asyncio.run(_measure(effort, config))


async def _measure(effort: Effort, config: RunConfig) -> Findings:
    effort = replace(effort, repeats=ROUNDS * effort.repeats)
    lengths = (config.sampler.max_tokens, LONG_TOKENS)
    num_rounds = effort.warmups + effort.repeats
    async with engines(config) as (stage, inference):
        rounds = stage.prompts(num_rounds * len(lengths), NUM_PROMPTS)
        [worker] = stage.spawner.workers("rollout")
        with raw_engine(stage.prepared, worker) as engine:
            sides = [
                Sides(stage.prepared, inference.rollouts, engine, rounds[place * num_rounds :], max_tokens)
                for place, max_tokens in enumerate(lengths)
            ]
            found = {side.max_tokens: await interleave(side.named, effort) for side in sides}
    return _findings(config, found, {side.max_tokens: side.mean_lengths for side in sides})


@dataclass
class Sides:
    """Measurements of one round with responses of at most `max_tokens`: each side, and the lengths."""

    prepared: Prepared
    pool: RolloutPool
    engine: Peer[GenerateJob, Generated]
    rounds: list[list[Prompt]]
    max_tokens: int
    lengths: dict[str, list[float]] = field(default_factory=lambda: {"ours": [], "raw": []})

    @property
    def named(self) -> dict[str, Side]:
        return {"ours": self.ours, "raw": self.raw, "raw_processed": self.processed}

    @property
    def mean_lengths(self) -> dict[str, float]:
        return {name: mean(values) for name, values in self.lengths.items()}

    async def ours(self, round_number: int) -> float:
        prompts = self.rounds[round_number]
        settings = self._settings(prompts)
        started = time.perf_counter()
        groups = await asyncio.gather(*map(self.pool.generate, prompts, settings))
        seconds = time.perf_counter() - started
        summaries = [generated.summary for generated in groups]
        self.lengths["ours"] += [summary.num_tokens / summary.num_trajectories for summary in summaries]
        return sum(summary.num_trajectories for summary in summaries) / seconds

    async def raw(self, round_number: int) -> float:
        return self._generate(round_number, is_processed=False)

    async def processed(self, round_number: int) -> float:
        return self._generate(round_number, is_processed=True)

    def _generate(self, round_number: int, *, is_processed: bool) -> float:
        prompts = self.rounds[round_number]
        settings = self._settings(prompts)
        raw = [RawPrompt.of(prompt) for prompt in prompts]
        generated = self.engine.ask(GenerateJob(raw, settings, is_processed))
        lengths = [len(tokens) for siblings in generated.responses for tokens in siblings]
        self.lengths["raw"] += lengths
        return len(lengths) / generated.seconds

    def _settings(self, prompts: Sequence[Prompt]) -> list[SamplingSettings]:
        return [replace(own, max_tokens=self.max_tokens) for own in settings_of(self.prepared.config, prompts)]


def _findings(
    config: RunConfig, found: dict[int, dict[str, tuple[float, ...]]], lengths: dict[int, dict[str, float]]
) -> Findings:
    what = {
        "ours": "Ray actor with AsyncLLM, through RolloutPool; images processed beforehand, by the driver",
        "raw": "LLM.generate alone in a process on the same core, with the very parameters of ours; PIL images "
        "processed within the clock",
        "raw_processed": "the same, with the images in vLLM's processor cache; no prompt or embedding is cached",
    }
    series: dict[str, Measurements] = {}
    claims: list[Claim] = []
    for max_tokens, sides in found.items():
        own = {name: Measurements(f"{max_tokens} tokens: {what[name]}", UNIT, values) for name, values in sides.items()}
        series |= {f"{name}_{max_tokens}": side for name, side in own.items()}
        processed, raw = (share(sides["ours"], sides[name]) for name in ("raw_processed", "raw"))
        claims.append(Claim(f"ours / raw with processed images, {max_tokens} tokens", processed, TARGET))
        claims.append(Claim(f"ours / raw that processes images, {max_tokens} tokens", raw))
    settings = {
        "prompts": NUM_PROMPTS,
        "samples_per_prompt": config.algorithm.samples_per_prompt,
        "mean_response_tokens": {str(max_tokens): by_side for max_tokens, by_side in lengths.items()},
        "chunk_tokens": config.sampler.chunk_tokens,
        "max_num_seqs": config.sampler.vllm.max_num_seqs,
        "threads": config.resources.rollout.num_threads,
    }
    return Findings(settings, series, tuple(claims))

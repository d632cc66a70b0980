"""Long responses that differ in length: loop, staleness, rollout and pushes with the responses of `digit_list`.

The policy is the tiny model after a short supervised warm start, which is made first: its responses are about as long
as the right ones, 20 to 250 tokens. The learning rate of the measured runs is so small that lengths stay as they are.
One engine and one learner rank have a core each.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest.mock import patch

import numpy as np
import ray

from benchmarks.digits_asynchrony import means, over_synchronous, steps_at
from benchmarks.harness.measure import Claim, Effort, Findings, Measurements, interleave, share
from benchmarks.harness.push_pause import Generation, Pushes, pause, served_weights
from benchmarks.harness.stage import Stage, engines, private_ray, scratch_config, scratch_folder, staged
from benchmarks.raw.raw_step import ONE_CORE_ENGINE, ONE_CORE_TRAINER, WHAT, RawStep
from benchmarks.raw.raw_vllm import raw_engine, settings_of
from benchmarks.rollout import Sides
from benchmarks.whole_step import OVERLAPPED, STEPS_A_BLOCK, UNIT, Blocks, in_blocks, mean_phases, raw_parts
from mobula.actors.rollout.actor import RolloutActor
from mobula.cluster.metrics.definitions import MetricName
from mobula.cluster.metrics.step_records import StepRecord
from mobula.cluster.runtime.ray_actors import answer
from mobula.configs.errors import ConfigError
from mobula.configs.schema import RunConfig
from mobula.deploy.wiring import roles
from mobula.deploy.wiring.roles import Inference, start_learner
from mobula.deploy.wiring.warm_start import warm_start
from mobula.learner.learner_group import LearnerGroup

EXPERIMENT = "digit_list"
WARM_START = (  # enough for the form of the answers; what they say does not matter here
    "warm_start.num_rows=0",
    "warm_start.num_steps=60",
    "warm_start.batch_size=32",
    "warm_start.learning_rate=2e-3",
    "warm_start.check_interval=60",
    "warm_start.max_checks_rows=8",
)
PROMPTS, SAMPLES = 8, 8  # of a step
SETTINGS = (
    "policy=hf",
    "warm_start.num_steps=0",
    f"algorithm.prompts_per_step={PROMPTS}",
    f"algorithm.samples_per_prompt={SAMPLES}",
    f"algorithm.max_concurrent_groups={2 * PROMPTS}",  # as many as a bound of 1 admits
    "algorithm.kl.coef=0",
    "learner.learning_rate=1e-7",
    "learner.warmup_steps=0",
    "evaluation.num_prompts=8",
    "evaluation.interval_steps=0",
    "checkpoints.interval_steps=0",
)
BOUNDS = (0, 1, 4)  # on staleness
ENGINE_PROMPTS = 16  # with their samples, as many responses as the engine decodes at a time
REST_S = 0.5  # between two pushes
TIMEOUT_S = 60.0
LOOP_TARGET, ROLLOUT_TARGET = 0.8, 0.9


def measure(effort: Effort, overrides: Sequence[str]) -> Findings:
    """The whole loop, bounds on staleness, the rollout actor, and pushes; one after the other.

    Raises:
        ConfigError: the run is not on CPU.
    """
    with ExitStack() as stack:
        config = stack.enter_context(_warm_config(overrides))
        if config.resources.device != "cpu":
            raise ConfigError(f"resources.device={config.resources.device}: this benchmark binds CPU cores, use cpu")
        stack.enter_context(private_ray(config))
        asyncio.run(_write_policy(Path(config.policy.model), overrides))
        loop = _loop(effort, config)
        steps = steps_at(config, BOUNDS, effort.num_steps // 2)
        rollout, recompute = asyncio.run(_rollout_and_pushes(effort, config))
        keep = asyncio.run(_pushes(effort, _keeping(config)))
    return _findings(config, loop, steps, rollout, {"recompute": recompute, "keep": keep})


@contextmanager
def _warm_config(overrides: Sequence[str]) -> Iterator[RunConfig]:
    """The settings of the measured runs; `policy.model` names a folder that is still empty."""
    with scratch_folder() as folder:
        settings = (*SETTINGS, *OVERLAPPED, f"policy.model={folder / 'policy'}")
        with scratch_config(settings, overrides, experiment=EXPERIMENT) as config:
            yield config


async def _write_policy(folder: Path, overrides: Sequence[str]) -> None:
    """Teach the tiny model the form of the answers, on the cluster that `private_ray` started."""
    with scratch_config((*WARM_START, *OVERLAPPED), overrides, experiment=EXPERIMENT) as config:
        async with staged(config, ("learner",)) as stage:
            ranks = LearnerGroup(partial(start_learner, stage.prepared, stage.spawner), config.timeouts, ray.put)
            await ranks.start()
            await warm_start(stage.prepared, ranks)
            await ranks.export(folder)
            await ranks.close()


@dataclass(frozen=True)
class _Loop:
    """Measurements of the loop, and the share of padding in the raw trainer's work."""

    blocks: Blocks
    padded_share: float


def _keeping(config: RunConfig) -> RunConfig:
    weight_sync = config.weight_sync.model_copy(update={"kv_cache": "keep"})
    return config.model_copy(update={"name": "keep", "weight_sync": weight_sync})


def _loop(effort: Effort, config: RunConfig) -> _Loop:
    num_blocks = max(1, effort.num_steps // STEPS_A_BLOCK)
    with ExitStack() as stack:
        raw: RawStep = asyncio.run(raw_parts(config, PROMPTS, num_blocks + 1, (1,), stack))
        blocks = in_blocks(config, raw, num_blocks)
    return _Loop(blocks, mean(raw.padded_shares))


class CountingActor(RolloutActor):
    """A rollout actor that counts the tokens which its engine computes. The engine's core is a thread of its process,
    as it is on CPU."""

    async def start(self) -> None:
        await super().start()
        self._num_computed = 0
        scheduler = self._sampler._engine.engine_core._core.scheduler
        schedule = scheduler.schedule

        def counted(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self._num_computed += output.total_num_scheduled_tokens
            return output

        scheduler.schedule = counted

    async def num_computed(self) -> int:
        """Tokens of prompts and responses that were scheduled so far; each as often as it was."""
        return self._num_computed


@dataclass(frozen=True)
class _Pushed:
    """One round: the same prompts without and with pushes, and the tokens that the engine computed for each."""

    undisturbed: Generation
    disturbed: Generation
    computed: tuple[int, int]

    @property
    def pause_s(self) -> float:
        return pause(self.undisturbed, self.disturbed)

    @property
    def recomputed(self) -> float:
        """Tokens that were computed again for one push."""
        without, with_pushes = self.computed
        return (with_pushes - without) / self.disturbed.num_pushes


async def _rollout_and_pushes(effort: Effort, config: RunConfig) -> tuple[_Rollout, list[_Pushed]]:
    async with _counting(config) as (stage, inference):
        return await _against_raw(effort, stage, inference), await _push_rounds(effort, stage, inference)


async def _pushes(effort: Effort, config: RunConfig) -> list[_Pushed]:
    async with _counting(config) as (stage, inference):
        return await _push_rounds(effort, stage, inference)


@asynccontextmanager
async def _counting(config: RunConfig) -> AsyncIterator[tuple[Stage, Inference]]:
    with patch.object(roles, "RolloutActor", CountingActor):
        async with engines(config) as found:
            yield found


@dataclass(frozen=True)
class _Rollout:
    """Responses/s of the rollout actor and of raw vLLM by round, and the lengths of the raw side's responses."""

    rates: Mapping[str, tuple[float, ...]]
    lengths: Sequence[float]


async def _against_raw(effort: Effort, stage: Stage, inference: Inference) -> _Rollout:
    [worker] = stage.spawner.workers("rollout")
    rounds = stage.prompts(effort.warmups + effort.repeats, ENGINE_PROMPTS)
    with raw_engine(stage.prepared, worker) as engine:
        sides = Sides(stage.prepared, inference.rollouts, engine, rounds, stage.prepared.config.sampler.max_tokens)
        rates = await interleave({"ours": sides.ours, "raw": sides.processed}, effort)
    return _Rollout(rates, sides.lengths["raw"])


async def _push_rounds(effort: Effort, stage: Stage, inference: Inference) -> list[_Pushed]:
    """Each round samples its prompts without and with pushes, each time after one: no prompt is in the cache then."""
    [client] = inference.rollouts.receivers()

    async def num_computed() -> int:
        call = client.handle.num_computed.remote()
        return await answer(call, timeout_s=TIMEOUT_S, what="the tokens that the engine computed")

    pushes, found = Pushes(stage, client), []
    wire = await pushes.connect(*served_weights(stage), epoch=1)
    for prompts in stage.prompts(effort.warmups + effort.repeats, ENGINE_PROMPTS):
        settings = settings_of(stage.prepared.config, prompts)
        await pushes.push(wire)
        start = await num_computed()
        undisturbed = await pushes.generate(prompts, settings)
        await pushes.push(wire)
        middle = await num_computed()
        disturbed = await pushes.disturb(wire, prompts, settings, REST_S)
        found.append(_Pushed(undisturbed, disturbed, (middle - start, await num_computed() - middle)))
    wire.publisher.close()
    return found[effort.warmups :]


def _findings(
    config: RunConfig,
    loop: _Loop,
    steps: dict[int, list[StepRecord]],
    rollout: _Rollout,
    pushed: Mapping[str, Sequence[_Pushed]],
) -> Findings:
    bounds, of_bounds = over_synchronous(steps)
    series = {**_loop_series(loop.blocks), **bounds, **_rollout_series(rollout)}
    claims = [
        Claim(
            "overlapped loop / overlapped limit of raw parts", share(loop.blocks.rates, loop.blocks.limit), LOOP_TARGET
        ),
        *of_bounds,
        Claim("rollout actor / raw LLM.generate", share(rollout.rates["ours"], rollout.rates["raw"]), ROLLOUT_TARGET),
    ]
    for kv_cache, found in pushed.items():
        series |= _push_series(kv_cache, found)
        claims += _push_claims(kv_cache, found)
    settings = {
        "prompts": PROMPTS,
        "samples_per_prompt": SAMPLES,
        "max_tokens": config.sampler.max_tokens,
        "response_tokens": _lengths(rollout.lengths),
        "mean_response_tokens": means(steps, MetricName.RESPONSE_LENGTH),
        "mean_staleness": means(steps, MetricName.STALENESS),
        "tokens_per_microbatch": config.learner.tokens_per_microbatch,
        "padded_share_of_raw_trainer": loop.padded_share,
        "prompts_of_a_pushed_generation": ENGINE_PROMPTS,
        "pushes_of_a_generation": {name: mean(f.disturbed.num_pushes for f in found) for name, found in pushed.items()},
        "seconds_of_a_step": mean_phases([step for block in loop.blocks.steps for step in block]),
    }
    return Findings(settings, series, tuple(claims))


def _lengths(lengths: Sequence[float]) -> dict[str, float]:
    return {
        "mean": float(np.mean(lengths)),
        "median": float(np.median(lengths)),
        "p90": float(np.quantile(lengths, 0.9)),
        "max": float(np.max(lengths)),
    }


def _loop_series(blocks: Blocks) -> dict[str, Measurements]:
    raw = (ONE_CORE_ENGINE, ONE_CORE_TRAINER)
    return {
        **{part: Measurements(WHAT[part], UNIT, tuple(rates[part] for rates in blocks.parts)) for part in raw},
        "loop_overlapped": Measurements(
            f"the loop with max_staleness=1, {STEPS_A_BLOCK} steps a value", UNIT, blocks.rates
        ),
        "limit_overlapped": Measurements("the overlapped limit of the raw parts around it", UNIT, blocks.limit),
    }


def _rollout_series(rollout: _Rollout) -> dict[str, Measurements]:
    what = {
        "ours": "Ray actor with AsyncLLM, through RolloutPool",
        "raw": "LLM.generate alone in a process on the same core, with the same prompts and parameters",
    }
    return {f"rollout_{side}": Measurements(what[side], "samples/s", rates) for side, rates in rollout.rates.items()}


def _push_series(kv_cache: str, found: Sequence[_Pushed]) -> dict[str, Measurements]:
    num = ENGINE_PROMPTS * SAMPLES
    of = f"of {num} responses by one push with kv_cache={kv_cache}"
    pauses, recomputed = tuple(f.pause_s for f in found), tuple(f.recomputed for f in found)
    return {
        f"pause_{kv_cache}": Measurements(f"delay of the generation {of}", "s", pauses),
        f"recomputed_{kv_cache}": Measurements(f"tokens computed again {of}", "tokens", recomputed),
    }


def _push_claims(kv_cache: str, found: Sequence[_Pushed]) -> list[Claim]:
    paused = median(f.pause_s / f.undisturbed.seconds for f in found)
    recomputed = median(f.recomputed / f.computed[0] for f in found)
    return [
        Claim(f"pause of a push / undisturbed generation, kv_cache={kv_cache}", paused),
        Claim(f"tokens recomputed for a push / tokens of the generation, kv_cache={kv_cache}", recomputed),
    ]

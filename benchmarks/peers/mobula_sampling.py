"""Mobula's flow sampler as one side: a batch of prompts a call, in a rollout actor within this process."""

from __future__ import annotations

import asyncio
import os
import sys
import time

from mobula.cluster.environment_variables import SLEEPING_THREADS

os.environ.update(SLEEPING_THREADS)  # as a worker has them: OpenMP reads them when torch is imported

import torch

from benchmarks.peers.step_clock import Run
from mobula.actors.rollout.actor import RolloutActor
from mobula.cluster.records.partial_response import Attempt
from mobula.cluster.roles import SamplingSettings
from mobula.configs.load import load_config
from mobula.deploy.wiring.preparation import prepare
from mobula.deploy.wiring.roles import engine_settings


async def main(num_calls: int, *words: str) -> None:
    """`words` describe a job of `mobula train` whose sampler is a flow sampler."""
    prepared = prepare(load_config(words), lambda value: value)
    actor = RolloutActor("flow", engine_settings(prepared, 0), object_timeout_s=5)
    torch.set_num_threads(prepared.config.resources.rollout.num_threads)  # threads that run already keep theirs
    await actor.start()
    rows = prepared.usable("train").rows
    prompts = [prepared.processor.prepare(row, f"0/{n}/x") for n, row in enumerate(rows)]
    num_images = prepared.config.algorithm.samples_per_prompt
    num_prompts = prepared.config.sampler.flow.batch_size // num_images
    run = Run()
    for call in range(num_calls):
        settings, first = SamplingSettings(num_images, 1.0, 1, call), call * num_prompts
        chosen = [prompts[n % len(prompts)] for n in range(first, first + num_prompts)]
        since = time.perf_counter()
        asked = [actor.generate(prompt, settings, Attempt(f"{call}/{prompt.prompt_id}")) for prompt in chosen]
        made = await asyncio.gather(*asked)
        run.seconds.append(time.perf_counter() - since)
        trajectories = [trajectory for group, *_ in made for trajectory in group.trajectories]
        run.samples.append(len(trajectories))
        run.tokens.append(sum(trajectory.num_steps for trajectory in trajectories))
    run.print()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), *sys.argv[2:]))

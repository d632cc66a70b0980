"""Mobula's flow sampler as one side: images of one prompt a call, in a rollout actor within this process."""

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


async def main(num_calls: int, num_images: int, *words: str) -> None:
    """`words` describe a job of `mobula train` whose sampler is a flow sampler."""
    prepared = prepare(load_config(words), lambda value: value)
    actor = RolloutActor("flow", engine_settings(prepared, 0), object_timeout_s=5)
    torch.set_num_threads(prepared.config.resources.rollout.num_threads)  # threads that run already keep theirs
    await actor.start()
    rows = prepared.usable("train").rows
    prompts = [prepared.processor.prepare(rows[n % len(rows)], f"0/{n}/x") for n in range(num_calls)]
    run = Run()
    for call, prompt in enumerate(prompts):
        since = time.perf_counter()
        group, *_ = await actor.generate(prompt, SamplingSettings(num_images, 1.0, 1, call), Attempt(str(call)))
        run.seconds.append(time.perf_counter() - since)
        run.samples.append(len(group.trajectories))
        run.tokens.append(sum(trajectory.num_steps for trajectory in group.trajectories))
    run.print()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))

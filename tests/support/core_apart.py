"""A rollout actor whose engine's core is a process of its own on CPU too, as it is on GPUs."""

from __future__ import annotations

import os

import mobula.actors.samplers.vllm.sampler as vllm_sampler
from mobula.actors.rollout.actor import RolloutActor


class CoreApart(RolloutActor):
    """Its engine is started on CPU as it is on GPUs."""

    async def start(self) -> None:
        vllm_sampler.in_process_engine = vllm_sampler.engine_in_its_own_process
        await super().start()

    async def processes(self) -> tuple[int, int]:
        """The actor's own process and the core's."""
        [core] = self._sampler._engine.engine_core.resources.engine_manager.processes
        return os.getpid(), core.pid

    async def num_in_flight(self) -> int:
        """Requests that are being sampled."""
        return self._sampler._in_flight._num

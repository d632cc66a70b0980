"""Rollout actors whose engine core is a process of its own on CPU too, or raises in the step that would begin a given
prompt, wherever the core runs."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import mobula.actors.samplers.vllm.sampler as vllm_sampler
from mobula.actors.rollout.actor import RolloutActor
from mobula.actors.samplers.vllm.weights import WorkerExtension

POISON = "MOBULA_TEST_POISON"  # in the environment of every process of the run: how the prompt's id begins
ANY = "*"
MESSAGE = "the device is gone"


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


class PoisonedExtension(WorkerExtension):
    """Runs in the core's process."""

    def poison(self, prompt_id: str) -> None:
        """Fail in each step that begins a request whose id holds this; ANY: in the next step."""
        execute = self.model_runner.execute_model

        def execute_unless_poisoned(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            ids = [request.req_id for request in scheduled.scheduled_new_reqs]
            if prompt_id == ANY or any(prompt_id in request_id for request_id in ids):
                raise RuntimeError(MESSAGE)
            return execute(scheduled, *args, **kwargs)

        self.model_runner.execute_model = execute_unless_poisoned


class Poisoned(RolloutActor):
    """Its core is a thread, as on CPU."""

    async def start(self) -> None:
        args = vllm_sampler.engine_args
        extension = f"{PoisonedExtension.__module__}.{PoisonedExtension.__name__}"
        vllm_sampler.engine_args = lambda settings: replace(args(settings), worker_extension_cls=extension)
        await super().start()
        if POISON in os.environ:
            await self.poison(os.environ[POISON])

    async def poison(self, prompt_id: str) -> None:
        await self._sampler._engine.collective_rpc("poison", args=(prompt_id,))


class PoisonedApart(Poisoned, CoreApart):
    """Its core is a process of its own, as on GPUs."""

"""Engines with adapters: one that is killed, and a plain vLLM engine with an exported adapter."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from adapter_engine import prompt_logprobs
from adapter_rows import LANGUAGE, write_adapters
from engines import Engine, new_learner, open_model, perturb_adapters, start_actor
from one_learner import saved
from PIL import Image
from waiting import until

from mobula.actors.datasets.rows import Row
from mobula.actors.rollout.actor import RolloutActor
from mobula.actors.rollout.client import RolloutClient
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.rollout.in_flight import InFlightRequests
from mobula.cluster.rollout.rollout_pool import HealthChecks, RolloutPool
from mobula.cluster.runtime.ray_actors import answer
from mobula.cluster.training_service.interfaces import SampleCall, SampleResult
from mobula.cluster.workers.status import RestartPolicy, WorkerState
from mobula.deploy.wiring.roles import adapter_engines
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl
from mobula.learner.policy_weights import export_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SERVING = ("sampler.adapters.max_served=2", "sampler.adapters.max_rank=8", "resources.rollout.num_workers=2")

LONG = SamplingSettings(num_samples=4, temperature=1.0, max_tokens=150, seed=3)


class KnownProcess(RolloutActor):
    """A rollout actor that names its process, and answers health checks as a spawned role does."""

    async def is_alive(self) -> None: ...

    async def process_id(self) -> int:
        return os.getpid()


def values(result: SampleResult) -> list[tuple[list[int], str]]:
    return [(sample.token_ids.tolist(), sample.stop_reason) for sample in result.samples]


async def test_calls_of_a_killed_engine_give_the_tokens_of_their_seed_and_its_successor_serves_all_adapters(
    local_ray: str, tmp_path: Path
) -> None:
    model = open_model(write_tiny_qwen2_5_vl(tmp_path / "model", seed=0), *SERVING)
    adapters = write_adapters(model, ["first", "second"], tmp_path / "adapters")
    in_flight, retried, losses = InFlightRequests(8), Counter[str](), []
    started: list[Engine] = []

    async def spawn(index: int) -> RolloutClient:
        started.append(start_actor(model, "vllm", index, KnownProcess))
        return started[-1].client

    async def nothing(index: int) -> None: ...

    policy = RestartPolicy(max_restarts=5, window_s=600, backoff_s=0.1, max_backoff_s=1)
    health = HealthChecks(interval_s=5, probe_interval_s=60, max_failures_in_a_row=3, no_worker_s=300)
    pool = RolloutPool(spawn, 2, release=nothing, policy=policy, health=health, on_lost=losses.append)
    engines = adapter_engines(model.prepared, pool, in_flight, lambda kind: retried.update([kind]))
    await pool.start()
    async with pool.tended():
        for name, folder in adapters.folders.items():
            await engines.serve(name, folder)
        calls = [
            SampleCall(prompt, LONG, name, has_prompt_logprobs=True)
            for prompt in model.prompts
            for name in (None, "first", "second")
        ]
        expected = [values(result) for result in await asyncio.gather(*map(engines.sample, calls))]
        assert not retried
        pid = await answer(started[0].handle.process_id.remote(), timeout_s=30, what="a process id")
        running = [asyncio.ensure_future(engines.sample(call)) for call in calls]
        await until(lambda: sum(worker.num_in_flight for worker in pool.status()) >= len(calls))
        os.kill(pid, signal.SIGKILL)
        assert [values(result) for result in await asyncio.gather(*running)] == expected
        assert retried["WorkerDiedError"] > 0
        assert losses == ["rollout_died"]
        await until(lambda: all(worker.state is WorkerState.SERVING for worker in pool.status()), deadline_s=300)
        assert len(started) == 3
        again = await asyncio.gather(*map(engines.sample, calls))
        assert [values(result) for result in again] == expected
        reborn = await answer(started[2].handle.engine_load.remote(), timeout_s=30, what="the load of an engine")
        assert reborn.num_tokens > 0, "the restarted engine took calls"
    await pool.close()


@pytest.mark.families
@pytest.mark.exhaustive
def test_log_probs_under_an_exported_adapter_are_those_of_the_merged_policy(tmp_path: Path) -> None:
    folder = write_tiny_qwen2_5_vl(tmp_path / "model", seed=0)
    model = open_model(folder, *LANGUAGE)
    image = tmp_path / "image.png"
    Image.fromarray(np.random.default_rng(3).integers(0, 255, size=(56, 56, 3), dtype=np.uint8)).save(image)
    rows = [
        Row("text", "Which digit follows 3?", "4", "4"),
        Row("image", "<image>Which digit is this?", "7", "7", (image,)),
    ]
    prompts = [model.processor.prepare(row, f"0/{n}/{row.sample_id}") for n, row in enumerate(rows)]
    learner = new_learner(model, *LANGUAGE)
    before = [learner.sequence_logprobs(prompt) for prompt in prompts]
    perturb_adapters(learner, seed=1, scale=0.3)
    expected = [learner.sequence_logprobs(prompt) for prompt in prompts]
    state = saved(learner, tmp_path / "state")
    export_state(learner._config, state, tmp_path / "adapter", merge=False, average=False)

    asked = [
        {"ids": prompt.compact_ids.tolist(), "images": [str(p) for p in row.images]}
        for prompt, row in zip(prompts, rows, strict=True)
    ]
    found = prompt_logprobs(folder, asked, {"trained": tmp_path / "adapter"}, tmp_path)
    for n, prompt in enumerate(prompts):
        for name, logprobs in (("base", before[n]), ("trained", expected[n])):
            ids, theirs = found[name][n]
            np.testing.assert_array_equal(ids, prompt.expanded_ids)
            own = np.ones(len(ids), dtype=bool)  # what stands behind an image's placeholder is no token
            for span in prompt.media_spans:
                own[span.start : span.end] = False
            np.testing.assert_allclose(theirs[own[1:]], logprobs[own[1:]], atol=2e-5, rtol=0, err_msg=f"{name} {n}")
        assert np.abs(expected[n] - before[n]).max() > 0.05, "the adapter changes what the policy says"

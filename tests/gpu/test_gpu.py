"""What only a GPU can show: bf16 engines beside a bf16 learner, pushes from GPU to GPU, and the main job on gpu_1."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engines import Engine, LocalSender, gaps, new_learner, open_model, perturb, probe_gap, start_actor, weight_sync
from jobs import Job

from cluster.metrics.report.run_folder import read_run_folder
from learner.learner import Learner
from learner.policies.tiny import write_tiny_qwen2_5_vl

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(NUM_GPUS == 0, reason="needs an NVIDIA GPU that torch can use"),
]
two_gpus = pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs: NCCL refuses two members on one")

CLOSE = 0.05  # nat, mean, bfloat16
CANARY = 0.2  # nat, largest; what the GPU presets accept


def engine_on(preset: str, folder: Path, *more: str) -> Engine:
    write_tiny_qwen2_5_vl(folder / "model", seed=0)
    words = ("sampler.kv_cache_bytes=1073741824", "sampler.enforce_eager=true", "weight_sync.bucket_bytes=1048576")
    engine = start_actor(open_model(folder / "model", f"resources={preset}", *words, *more), "vllm", index=0)
    asyncio.run(engine.client.start())
    return engine


@pytest.fixture(scope="module")
def shared(local_ray: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine that shares its GPU with the learner; weights go over gloo."""
    engine = engine_on("gpu_1", tmp_path_factory.mktemp("gpu_1"))
    yield engine
    asyncio.run(engine.close())


@pytest.fixture
def learner(shared: Engine) -> Iterator[Learner]:
    learner = new_learner(shared.model)
    yield learner
    learner.close()


async def test_bf16_engine_and_learner_agree_on_text_one_and_two_pictures(shared: Engine, learner: Learner) -> None:
    await shared.serve(learner, version=0)
    groups = await asyncio.gather(*(shared.sample(prompt, num_samples=8) for prompt in shared.model.prompts))
    found = gaps(learner, shared.model, groups)
    assert found.size > 100
    assert found.mean() <= CLOSE


async def test_a_push_over_gloo_brings_a_gpu_engine_to_the_learners_weights(shared: Engine, learner: Learner) -> None:
    await shared.serve(learner, version=0)
    sync = weight_sync(shared, LocalSender(learner), tolerance=CANARY)
    for version in (1, 2):
        perturb(learner, seed=version)
        assert await probe_gap(shared, learner) > CANARY, "before the push the engine has other weights"
        assert await sync.publish(version) == version
        assert await probe_gap(shared, learner) <= CANARY


@two_gpus
async def test_an_engine_over_two_gpus_agrees_with_the_learner_after_pushes_to_both_ranks(
    local_ray: str, tmp_path: Path
) -> None:
    split = ("resources.rollout.tensor_parallel=2", "resources.rollout.num_gpus=2")
    engine = await asyncio.to_thread(engine_on, "gpu_1", tmp_path, *split)
    learner = new_learner(engine.model)
    try:
        await engine.serve(learner, version=0)
        sync = weight_sync(engine, LocalSender(learner), tolerance=CANARY, ranks_of_receiver=2)
        for version in (1, 2):
            perturb(learner, seed=version)
            assert await probe_gap(engine, learner) > CANARY, "before the push the engine has other weights"
            assert await sync.publish(version) == version
            assert await probe_gap(engine, learner) <= CANARY
    finally:
        learner.close()
        await engine.close()


@pytest.mark.parametrize("preset", ["gpu_1", "gpu_1_colocated", pytest.param("gpu_2", marks=two_gpus)])
def test_the_main_job_runs_on_gpus_and_every_push_arrives(tmp_path: Path, preset: str) -> None:
    """gpu_1 pushes over gloo, with engine and learner at the same time or in turns; gpu_2 over NCCL, from one GPU to
    the other."""
    words = ("experiment=digits", f"resources={preset}", f"data.path={tmp_path / 'digits'}", "num_steps=3")
    sampler = ("sampler.kv_cache_bytes=1073741824", "sampler.enforce_eager=true")
    job = Job(tmp_path, (*words, *sampler, "weight_sync.canary_interval=1"))
    try:
        job.finish(job.start())
    finally:
        job.end()
    summary = read_run_folder(job.run_folder).summary
    assert (summary.status, summary.version, summary.sampler) == ("done", 3, "vllm")
    assert summary.logprob_gap_mean <= CLOSE
    assert summary.canary_max <= CANARY
    assert set(summary.staleness) == {0}

"""Engine and learner in turns on one GPU: what they give back, and what is there again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from engines import LocalSender, new_learner, open_model, perturb, probe_gap, start_actor, weight_sync
from gpus import ON_A_GPU

from mobula.learner.policies.base import on_device
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl
from mobula.learner.rank import Offloader

pytestmark = [*ON_A_GPU, pytest.mark.slow, pytest.mark.timeout(1200)]

KV_BYTES = 1 << 30
CLOSE = 5e-3  # nat, largest, float32


def free_bytes() -> int:
    return torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize("level", [1, 2])
async def test_an_engine_that_slept_computes_with_the_next_weights(local_ray: str, tmp_path: Path, level: int) -> None:
    write_tiny_qwen2_5_vl(tmp_path / "model", seed=0)
    words = ("resources=one_gpu_colocated", f"resources.sleep_level={level}", "resources.dtype=float32")
    model = open_model(tmp_path / "model", *words, f"sampler.vllm.kv_cache_bytes={KV_BYTES}")
    engine = await asyncio.to_thread(start_actor, model, "vllm", 0)
    await engine.client.start()
    learner = new_learner(model)
    try:
        sync = weight_sync(engine, LocalSender(learner), canary_interval=0)
        await sync.publish(1)
        awake = free_bytes()
        for version in (2, 3):
            await engine.client.sleep()
            assert free_bytes() - awake >= KV_BYTES
            perturb(learner, seed=version)
            await engine.client.wake_up("weights")
            assert free_bytes() - awake >= KV_BYTES, "the KV cache sleeps on while weights arrive"
            await sync.publish(version)
            await engine.client.wake_up("kv_cache")
            assert await probe_gap(engine, learner) <= CLOSE
    finally:
        learner.close()
        await engine.close()


def test_a_rank_frees_its_gpu_and_comes_back_bit_for_bit() -> None:
    device = torch.device("cuda")
    policy = torch.nn.Linear(4096, 4096, device=device)
    optimizer = torch.optim.AdamW(policy.parameters())
    policy(torch.ones(2, 4096, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = [p.detach().clone().cpu() for p in policy.parameters()]
    moments = [state["exp_avg"].clone().cpu() for state in optimizer.state.values()]
    offloader, held = Offloader(policy, optimizer, device), torch.cuda.memory_allocated()  # type: ignore[arg-type]
    for _ in range(2):
        offloader.offload("optimizer")
        offloader.offload("policy")
        assert held - torch.cuda.memory_allocated() >= 3 * 4 * 4096 * 4096
        assert all(p.is_pinned() for p in policy.parameters())
        offloader.onload()
        assert all(torch.equal(p.cpu(), old) for p, old in zip(policy.parameters(), before, strict=True))
        found = [state["exp_avg"].cpu() for state in optimizer.state.values()]
        assert all(torch.equal(new, old) for new, old in zip(found, moments, strict=True))


def test_copies_of_a_micro_batch_do_not_wait_for_the_gpu() -> None:
    device = torch.device("cuda")
    array = torch.arange(1 << 20).numpy()
    torch.cuda._sleep(500_000_000)  # some 0.3 s
    working = torch.cuda.Event()
    working.record()
    copy = on_device(array, device)
    assert not working.query(), "the copy returned while the GPU was at work"
    assert torch.equal(copy.cpu(), torch.from_numpy(array))

"""Learner ranks of a GPU each, over NCCL, train as one does: rows in parts, replicas; and two of them send a push."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from backend_run import equal, train_on_gpu
from gpus import NUM_GPUS, two_gpus

from mobula.cluster.weight_sync.manifest import Manifest, TensorSpec
from mobula.cluster.weight_sync.transport import TransferGroup
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl
from mobula.learner.weight_publisher import WeightPublisher

TIMEOUT_S = 60.0  # the first communicator of a process takes seconds
ON_GPUS = ("resources=two_gpu", "sampler.vllm.kv_cache_bytes=268435456", "sampler.vllm.max_num_seqs=8")
FLOAT32 = ("resources.dtype=float32",)
HALVES = ("learner.sequence_parallel=2",)
REPLICAS = ("resources.learner.replicas=2",)
AXES = {  # name -> number of ranks, and their overrides
    "halves of rows": (2, (*FLOAT32, *HALVES)),
    "halves of packed rows": (2, (*FLOAT32, *HALVES, "learner.packing=true")),
    "replicas": (2, (*FLOAT32, *REPLICAS)),
    "two replicas of two shards": (4, (*FLOAT32, *REPLICAS)),
    "two replicas, halves": (4, (*FLOAT32, *REPLICAS, *HALVES)),
    "halves of rows in bfloat16": (2, HALVES),  # through torch's kernel for rows of different lengths
}
BFLOAT16_ATOL = 0.1  # of log-probs; the weights move by 1e-3 a step

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(900), two_gpus]


def _trained(num_ranks: int, words: tuple[str, ...], model: Path, out: Path) -> dict:
    out.mkdir()
    multiprocessing.set_forkserver_preload(["backend_run"])
    args = (num_ranks, (*ON_GPUS, *words), model, out)
    mp.start_processes(train_on_gpu, args=args, nprocs=num_ranks, start_method="forkserver")
    return torch.load(out / "seen.pt", map_location="cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny") / "model", seed=0)


@pytest.fixture(scope="module")
def one(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    return _trained(1, FLOAT32, model, tmp_path_factory.mktemp("one") / "out")


@pytest.mark.parametrize("name", AXES)
def test_ranks_equal_one_process(name: str, one: dict, model: Path, tmp_path: Path) -> None:
    num_ranks, words = AXES[name]
    if num_ranks > NUM_GPUS:
        pytest.skip(f"needs {num_ranks} GPUs, one a rank, and there are {NUM_GPUS}")
    many = _trained(num_ranks, words, model, tmp_path / "out")
    assert equal(many["third_again"], many["third"], atol=1e-6)  # GPUs add gradients of embeddings in any order
    if "bfloat16" in name:
        torch.testing.assert_close(many["canary"], one["canary"], atol=BFLOAT16_ATOL, rtol=0)
        return
    assert equal(many["weights"], one["weights"], atol=1e-5)
    assert not equal(one["weights"], one["before"], atol=1e-4)
    torch.testing.assert_close(many["canary"], one["canary"], atol=1e-4, rtol=0)


@pytest.mark.skipif(NUM_GPUS < 3, reason="needs three GPUs: two senders and a receiver")
def test_two_senders_send_a_part_of_the_buckets_each() -> None:
    manifest = Manifest(tuple(TensorSpec(f"t{n}", (256, 64 * (1 + n % 4)), "float32") for n in range(7)))
    devices = [torch.device("cuda", n) for n in range(3)]
    weights = {spec.name: torch.randn(spec.shape) for spec in manifest.tensors}
    publishers = [
        WeightPublisher(
            manifest,
            lambda device=device: ((name, tensor.to(device)) for name, tensor in weights.items()),
            rank=rank,
            device=device,
            transport="nccl",
            timeout_s=TIMEOUT_S,
            num_ranks=2,
            num_senders=2,
        )
        for rank, device in enumerate(devices[:2])
    ]
    at = publishers[0].open_transfer(1, 1)
    with ThreadPoolExecutor(3) as threads:
        joining = [threads.submit(publisher.join_transfer, at) for publisher in publishers]
        receiver = threads.submit(TransferGroup, at, 1, devices[2]).result(3 * TIMEOUT_S)
        for joined in joining:
            joined.result(3 * TIMEOUT_S)
        sending = [threads.submit(publisher.send, 1 << 17, 1) for publisher in publishers]
        receiving = threads.submit(lambda: list(receiver.receive(manifest, 1 << 17, keeps=True)))
        received = dict(receiving.result(3 * TIMEOUT_S))
        for sent in sending:
            sent.result(3 * TIMEOUT_S)
    assert received.keys() == weights.keys()
    assert all(torch.equal(received[name].cpu(), weights[name]) for name in weights)
    for member in (*publishers, receiver):
        member.close()

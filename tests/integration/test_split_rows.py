"""Ranks that share the tokens of rows compute the same log-probs, and keep a share of the activations each."""

from __future__ import annotations

import multiprocessing
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from kept_bytes import kept_bytes
from learner_data import tiny_config
from tiny_text_models import write_text_policy

from mobula.cluster.records.media import MediaReader
from mobula.learner.policies.attention.sequence_ranks import SequenceRanks
from mobula.learner.policies.batch import TokenSequence, collate
from mobula.learner.policies.loading import load_model
from mobula.learner.policies.logprobs import PLAIN
from mobula.learner.policies.token import TokenPolicy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUM_TOKENS = 2048
LENGTHS = (50, 3, 17, 1, 30)  # of the targets of rows; together with their contexts no multiple of 4
FAMILIES = ("qwen3", "gemma3_text")  # the latter has a window of 16 tokens
CPU = torch.device("cpu")


def _of_length(num_tokens: int, num_targets: int) -> TokenSequence:
    ids = torch.randint(0, 200, (num_tokens,), generator=torch.Generator().manual_seed(num_tokens)).numpy()
    return TokenSequence(ids, num_tokens - num_targets, (), ())


def _rank(rank: int, num_ranks: int, out: Path) -> None:
    """Writes log-probs of rows of each family, and the bytes that autograd keeps of one forward pass of a long row."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(out / f"store-{num_ranks}"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    ranks = SequenceRanks(num_ranks, CPU) if num_ranks > 1 else None
    reader = MediaReader(timeout_s=1.0, max_items=1)
    for name in FAMILIES:
        folder = out / name
        config = tiny_config(folder, "learner.packing=true").learner
        policy = TokenPolicy(load_model(str(folder), torch.float32, "sdpa").train(), config, ranks)
        batch = collate([_of_length(10 + length, length) for length in LENGTHS], reader, CPU)
        long = collate([_of_length(NUM_TOKENS, NUM_TOKENS // 2)], reader, CPU)
        kept = kept_bytes(partial(policy, long, PLAIN), policy.parameters())
        torch.save((policy(batch, PLAIN), kept), out / f"{name}-{num_ranks}-{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("split")
    for name in FAMILIES:
        write_text_policy(out / name, name)
    multiprocessing.set_forkserver_preload(["kept_bytes"])
    for num_ranks in (1, 2, 4):
        mp.start_processes(_rank, args=(num_ranks, out), nprocs=num_ranks, start_method="forkserver")
    return out


@pytest.mark.parametrize("name", FAMILIES)
def test_every_rank_has_the_outputs_of_whole_rows(ran: Path, name: str) -> None:
    whole, _ = torch.load(ran / f"{name}-1-0", weights_only=False)
    for num_ranks, rank in [(2, 0), (2, 1), (4, 0), (4, 3)]:
        split, _ = torch.load(ran / f"{name}-{num_ranks}-{rank}", weights_only=False)
        torch.testing.assert_close(split.logprobs, whole.logprobs, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(split.entropy, whole.entropy, atol=1e-6, rtol=1e-6)
        assert torch.equal(split.is_argmax, whole.is_argmax)


def test_each_of_two_ranks_keeps_at_most_six_tenths_of_a_row(ran: Path) -> None:
    _, whole = torch.load(ran / f"{FAMILIES[0]}-1-0", weights_only=False)
    for rank in range(2):
        _, kept = torch.load(ran / f"{FAMILIES[0]}-2-{rank}", weights_only=False)
        assert kept <= 0.6 * whole

"""Two ranks that fetch their shares of a step train as two ranks that fetch all of it, bit for bit."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from backend_run import config_of, equal, met_at, weights
from learner_data import random_groups
from transformers import AutoTokenizer

from mobula.cluster.records.trajectory import ScoredGroup
from mobula.learner import batch
from mobula.learner.learner import Learner
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl
from mobula.learner.shares import StepGroups

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TWO = ("learner=fsdp2", "resources.learner.num_workers=2")
CASES = {
    "share": (),
    "epochs": (
        "algorithm=reinforce_pp",
        "algorithm.kl.coef=0.05",
        "algorithm.num_epochs=2",
        "algorithm.num_minibatches=2",
        "algorithm.old_logprobs=recomputed",
        "algorithm.entropy.top_share=0.5",
        "algorithm.shaping.repetition_penalty=0.1",
    ),
    "critic": ("algorithm=ppo_gae", "algorithm.kl.coef=0", "algorithm.critic.learning_rate=1e-3"),
}


@dataclass(frozen=True)
class Filed:
    """Stands for an object reference: a value in a file."""

    path: Path


def filed(groups: Sequence[ScoredGroup], folder: Path) -> list[ScoredGroup]:
    """The groups with references in the place of values, and with reference log-probs."""
    folder.mkdir()
    rng, found = np.random.default_rng(0), []
    for n, scored in enumerate(groups):
        logprobs = [rng.normal(-5, 0.1, size=t.num_steps).astype(np.float32) for t in scored.group.trajectories]
        for name, value in (("group", scored.group), ("logprobs", logprobs)):
            (folder / f"{n}-{name}").write_bytes(pickle.dumps(value))
        found.append(
            replace(scored, group=Filed(folder / f"{n}-group"), reference_logprobs=Filed(folder / f"{n}-logprobs"))
        )
    return found


class AllGroups:
    """In the place of a ShareFetcher: every rank fetches everything."""

    def fetch(self, entries: StepGroups) -> list[list[Any]]:
        return entries.fetch(range(len(entries)))


def train(rank: int, words: Sequence[str], model: Path, steps: Sequence[Sequence[ScoredGroup]], out: Path) -> None:
    """Three updates; each rank writes what it fetched, and rank 0 what came out."""
    num_bytes = 0

    def fetch(references: Sequence[Any], *, timeout_s: float, what: str) -> list[Any]:
        nonlocal num_bytes
        contents = [reference.path.read_bytes() for reference in references]
        num_bytes += sum(map(len, contents))
        return [pickle.loads(content) for content in contents]

    batch.fetch_or_miss = fetch
    seen = {}
    for way in ("shares", "everything"):
        (out / way).mkdir(exist_ok=True)
        ranked, num_bytes = Learner(config_of(model, *TWO, *words), rank, 2, (250,)), 0
        ranked.connect(met_at(ranked, rank, out / way / "address"))
        ranked.begin_rl()
        if way == "everything":
            ranked._shares = AllGroups()
        metrics = [dict(ranked.update(groups, n + 1).metrics) for n, groups in enumerate(steps)]
        seen[way] = (metrics, weights(ranked), num_bytes)
        ranked.close()
    torch.save(seen, out / f"seen-{rank}.pt")


def _rank(rank: int, model: Path, steps: Sequence[Sequence[ScoredGroup]], out: Path) -> None:
    torch.set_num_threads(1)
    for name, words in CASES.items():
        train(rank, words, model, steps, out / name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Below each case's name what its ranks saw."""
    out = tmp_path_factory.mktemp("transport")
    model = write_tiny_qwen2_5_vl(out / "model", seed=0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    steps = [filed(random_groups(tokenizer, 9, 3, seed=seed, longest=40), out / f"step-{seed}") for seed in range(3)]
    for name in CASES:
        (out / name).mkdir()
    multiprocessing.set_forkserver_preload(["backend_run"])
    mp.start_processes(_rank, args=(model, steps, out), nprocs=2, start_method="forkserver")
    return out


@pytest.mark.parametrize("name", CASES)
def test_an_update_is_the_same_bit_for_bit(folder: Path, name: str) -> None:
    seen = torch.load(folder / name / "seen-0.pt")
    metrics, found, _ = seen["shares"]
    expected_metrics, expected, _ = seen["everything"]
    assert metrics == expected_metrics
    assert equal(found, expected, atol=0)
    assert all(step["grad_norm"] > 0 for step in metrics)


def test_a_rank_fetches_its_share_alone(folder: Path) -> None:
    ranks = [torch.load(folder / "share" / f"seen-{rank}.pt") for rank in range(2)]
    everything = ranks[0]["everything"][2]
    assert ranks[1]["everything"][2] == everything
    own = [rank["shares"][2] for rank in ranks]
    assert max(own) < 0.9 * everything, "images lie in the groups here, and one rank has most of them"
    assert everything <= sum(own) < 1.25 * everything

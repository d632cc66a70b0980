"""Continuous image tokens over two ranks of FSDP2: an update equals that of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from backend_run import connected, equal, leave, weights
from fakes import make_trajectory
from flow_run import made_loud_patches, patch_config

from mobula.cluster.records.actions import PatchActions
from mobula.cluster.records.trajectory import Prompt, Response, Reward, ScoredGroup, TrajectoryGroup
from mobula.configs.schema.rollout import ImagePatchesConfig
from mobula.learner.backends import native
from mobula.learner.learner import Learner
from mobula.learner.policies.flow.patches import patch_schedule

CASES = {"full": (), "lora": ("policy.lora.rank=4",), "guided": ("sampler.flow.guidance=3",)}


def groups() -> list[ScoredGroup]:
    """Three groups of two random images behind prompts of different lengths."""
    schedule, rng = patch_schedule(4, ImagePatchesConfig()), np.random.default_rng(0)
    found = []
    for n in range(3):
        ids, siblings = rng.integers(0, 256, 6 + 9 * n).astype(np.int32), []
        for sibling in range(2):
            latents = rng.normal(size=(5, 16, 16)).astype(np.float32)
            steps = np.arange(4, dtype=np.int32)
            actions = PatchActions(
                latents, steps, schedule.timesteps.numpy(), schedule.sigmas.numpy(), 0.5 * latents[-1]
            )
            made = make_trajectory(f"0/{n}/x#{sibling}", (0,) * actions.num_steps)
            response = Response("", actions.num_steps, is_truncated=False, images=(b"png",))
            logprobs = np.full(actions.num_steps, -1, dtype=np.float32)
            siblings.append(replace(made, actions=actions, behavior_logprobs=logprobs, response=response))
        group = TrajectoryGroup(Prompt(f"0/{n}/x", "x", "x", ids, ids, (), ()), tuple(siblings))
        found.append(ScoredGroup(group.summary(), group, (Reward(float(n % 2)), Reward(0.5))))
    return found


def train(rank: int, num_ranks: int, folder: Path, out: Path) -> None:
    torch.set_num_threads(1)
    native.MIN_UNIT_NUMEL = 0  # every block is a unit
    for name, words in CASES.items():
        ranks = ("learner=fsdp2", f"resources.learner.num_workers={num_ranks}") if num_ranks > 1 else ()
        # A small eps turns the rounding of a gradient near 0 into a step.
        exact = ("algorithm.old_logprobs=recomputed", "learner.tokens_per_microbatch=200", "learner.adam_eps=1.0e-4")
        config = patch_config(folder, *words, *exact, *ranks)
        learner = connected(Learner(config, rank, num_ranks, ()), rank, num_ranks, out / f"address-{name}-{num_ranks}")
        before = weights(learner)
        metrics = dict(learner.update(groups(), 1).metrics)
        seen = {"before": before, "after": weights(learner), "metrics": metrics}
        leave(learner, rank, seen, out / f"{name}-{num_ranks}.pt")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ranks")
    made_loud_patches(out / "model")
    for num_ranks in (1, 2):
        mp.start_processes(train, args=(num_ranks, out, out), nprocs=num_ranks, start_method="forkserver")
    return out


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one(ran: Path, name: str) -> None:
    one, two = (torch.load(ran / f"{name}-{num}.pt") for num in (1, 2))
    assert equal(one["after"], two["after"], atol=2e-6)
    assert not equal(one["after"], one["before"], atol=2e-5)
    assert two["metrics"]["grad_norm"] == pytest.approx(one["metrics"]["grad_norm"], rel=1e-4)

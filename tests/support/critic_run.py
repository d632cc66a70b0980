"""What one rank does in the tests of a critic: a warm start, updates, a checkpoint and the way back to it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from backend_run import met_at, steps, weights
from learner_data import cut_off, image, prompt
from one_learner import at_hand
from transformers import AutoTokenizer

from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.configs.schema import RunConfig
from mobula.learner.batch import fetch_items
from mobula.learner.examples import Example
from mobula.learner.learner import Learner

WORDS = (
    "algorithm=ppo_gae", "algorithm.kl.coef=0", "algorithm.num_epochs=2", "algorithm.num_minibatches=2",
    "algorithm.critic.learning_rate=1e-3", "algorithm.critic.warmup_steps=1",
)  # fmt: skip


def train(config: RunConfig, rank: int, world_size: int, out: Path) -> None:
    """One rank; rank 0 writes what it saw."""
    tokenizer = AutoTokenizer.from_pretrained(config.policy.model)
    learner = Learner(config, rank, world_size, (250,))
    learner.connect(met_at(learner, rank, out / "address") if world_size > 1 else "")
    updates = [[cut_off(groups[0]), *groups[1:]] for groups in steps(tokenizer)]
    seen = follow(learner, [*updates, updates[0]], tokenizer, out)
    if rank == 0:
        torch.save(seen, out / "seen.pt")
    learner.close()


def follow(learner: Learner, updates: list[list[ScoredGroup]], tokenizer, out: Path) -> dict:
    """RL begins from a supervised step; two updates, save, a third one; load, and the third one again."""
    answer = np.array([1, 2, 3], np.int32)
    asked = [prompt(tokenizer, "a", [image(9)]), prompt(tokenizer, "b")]
    learner.supervised_step(at_hand([Example.of_answer(a, TokenActions(answer), answer > 0) for a in asked]))
    before = values(learner, updates[1])
    learner.begin_rl()
    seen = {"before": before, "start": values(learner, updates[1]), "policy_before": weights(learner)}
    seen["metrics"] = [dict(learner.update(groups, n + 1).metrics) for n, groups in enumerate(updates[:2])]
    seen |= {"policy": weights(learner), "values": values(learner, updates[1])}
    learner.save(out / "state")
    learner.finish_save()
    seen["third"] = (dict(learner.update(updates[2], 3).metrics), weights(learner), values(learner, updates[1]))
    learner.load(out / "state")
    seen["reloaded"] = values(learner, updates[1])
    seen["again"] = (dict(learner.update(updates[2], 3).metrics), weights(learner), values(learner, updates[1]))
    return seen


def values(learner: Learner, groups: list[ScoredGroup]) -> torch.Tensor:
    """Of every token of these groups, one after the other; every rank has all of them."""
    valued = learner._critic.valued(fetch_items(groups, 0, 1.0))
    return torch.from_numpy(np.concatenate([item.values for row in valued for item in row]))

"""A learner process that is killed on the way, and another one that goes on from the checkpoint before that."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from learner_data import random_groups, tiny_config, with_reference
from one_learner import connected_learner, saved
from transformers import AutoTokenizer

NUM_STEPS = 5
INTERVAL = 2  # steps between two checkpoints
WORDS = (
    "algorithm=ppo_gae", "algorithm.kl.coef=0.1", "algorithm.kl.controller=adaptive", "algorithm.kl.horizon=50",
    "algorithm.max_staleness=9", "algorithm.num_epochs=2", "algorithm.critic.learning_rate=1e-3",
    "algorithm.critic.warmup_steps=1", "algorithm.shaping.running_moments=scale", "resources.reference.num_workers=1",
    f"num_steps={NUM_STEPS}",
)  # fmt: skip


def follow(model: Path, folder: Path, kill_after: int) -> None:
    """All steps from the newest checkpoint in `folder` on; this process kills itself after step `kill_after`, unless
    that is 0. Leaves what it came to in `end.pt` and its state in `end`."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    learner = connected_learner(tiny_config(model, *WORDS), (250,))
    found = sorted(folder.glob("step-*"))
    begun_at = learner.load(found[-1]) if found else 0
    if not found:
        learner.begin_rl()
        saved(learner, folder / "draft").rename(folder / "step-0")  # a checkpoint is complete or does not exist
    metrics = {}
    for version in range(begun_at + 1, NUM_STEPS + 1):
        groups = [with_reference(g, gap=0.1) for g in random_groups(tokenizer, 3, 3, seed=10 * version)]
        metrics[version] = dict(learner.update(groups, version).metrics)
        if version % INTERVAL == 0:
            saved(learner, folder / "draft").rename(folder / f"step-{version}")
        if version == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
    saved(learner, folder / "end")
    torch.save({"metrics": metrics, "begun_at": begun_at}, folder / "end.pt")

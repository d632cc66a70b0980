"""A learner process that is killed on the way, and another one that goes on from the checkpoint before that."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path

import torch
from learner_data import random_groups, tiny_config
from transformers import AutoTokenizer

from mobula.learner.learner import Learner

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
    that is 0. Leaves what it came to in `end.pt`."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    words = [word for word in WORDS if not word.startswith("algorithm.kl.coef")]
    learner = Learner(tiny_config(model, *words, "algorithm.kl.coef=0.1"), 0, 1, (250,))
    learner.connect("")
    found = sorted(folder.glob("step-*"))
    begun_at = learner.load(found[-1]) if found else 0
    if not found:
        learner.begin_rl()
        save(learner, folder)
    metrics = {}
    for version in range(begun_at + 1, NUM_STEPS + 1):
        metrics[version] = dict(learner.update(groups(tokenizer, version), version).metrics)
        if version % INTERVAL == 0:
            save(learner, folder)
        if version == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
    critic = learner._critic
    states = [opt.state_dict()["state"] for opt in (learner._optimizer, critic._optimizer)]
    models = [model.state_dict() for model in (learner._policy, critic._model)]
    torch.save({"models": models, "optimizers": states, "metrics": metrics, "begun_at": begun_at}, folder / "end.pt")


def save(learner: Learner, folder: Path) -> None:
    """A checkpoint is complete or does not exist."""
    draft = folder / "draft"
    learner.save(draft)
    learner.finish_save()
    draft.rename(folder / f"step-{learner.version}")


def groups(tokenizer, version: int) -> list:
    """Those of one step, a function of its version; the reference is another policy."""
    return [
        dataclasses.replace(scored, reference_logprobs=[t.behavior_logprobs - 0.1 for t in scored.group.trajectories])
        for scored in random_groups(tokenizer, 3, 3, seed=10 * version)
    ]

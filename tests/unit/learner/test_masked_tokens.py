"""What an environment wrote has no part in an update, whatever is recorded for its tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_data import group, image, prompt, tiny_config, with_logprobs
from transformers import AutoTokenizer

from mobula.cluster.records.trajectory import ScoredGroup
from mobula.learner.learner import Learner

MASKS = ([True, True, False, False, True], [True, False, False, True])
REFERENCE = ("algorithm.kl.coef=0.1", "resources.reference.num_workers=1")


def episodes(folder: Path, garbage: float) -> ScoredGroup:
    """Two episodes; log-probs of the policy and of the reference under False are `garbage`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scored = group(prompt(tokenizer, "a", [image(1)]), [[1, 2, 60, 61, 3], [4, 62, 63, 5]], [1.0, 0.0])
    masks = [np.array(mask) for mask in MASKS]
    logprobs = [np.where(mask, -5.0, garbage).astype(np.float32) for mask in masks]
    trajectories = tuple(
        dataclasses.replace(t, action_mask=mask) for t, mask in zip(scored.group.trajectories, masks, strict=True)
    )
    scored = dataclasses.replace(scored, group=dataclasses.replace(scored.group, trajectories=trajectories))
    references = [np.where(mask, -5.2, -garbage).astype(np.float32) for mask in masks]
    return dataclasses.replace(with_logprobs(scored, logprobs), reference_logprobs=references)


def updated(folder: Path, garbage: float, *words: str) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    learner = Learner(tiny_config(folder, *words), 0, 1, ())
    learner.connect("")
    learner.begin_rl()
    metrics = learner.update([episodes(folder, garbage)], 1).metrics
    return {name: tensor.clone() for name, tensor in learner._named_weights()}, dict(metrics)


@pytest.mark.parametrize(
    "words",
    [
        REFERENCE,
        ("algorithm=reinforce_pp", "algorithm.kl.coef=0.1", "resources.reference.num_workers=1"),
        (*REFERENCE, "algorithm.loss=gspo", "algorithm.old_logprobs=recomputed", "algorithm.correction=tis_sequence"),
        ("algorithm=ppo_gae", "resources.reference.num_workers=1", "algorithm.critic.learning_rate=0.001"),
    ],
)
def test_garbage_at_masked_tokens_leaves_the_update_as_it_is(folder: Path, words: tuple[str, ...]) -> None:
    weights, metrics = updated(folder, 0.0, *words)
    others, other_metrics = updated(folder, -7.5, *words)
    assert metrics["loss"] != 0 and metrics == pytest.approx(other_metrics, abs=1e-7)
    assert all(torch.equal(weights[name], others[name]) for name in weights)

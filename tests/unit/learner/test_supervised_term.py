"""Supervised rows beside an RL step: their cross-entropy by plain transformers, added to the loss, and resumed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from fakes import LocalHandle
from learner_data import random_groups, tiny_config
from offline_rows import rows
from one_learner import connected_learner, copied
from test_offline_learner import plain_logprobs
from transformers import AutoModelForImageTextToText

from mobula.cluster.records.trajectory import ScoredGroup
from mobula.cluster.rollout.row_stream import SupervisedRows
from mobula.configs.schema import RunConfig
from mobula.learner.learner import Learner
from mobula.learner.learner_group import LearnerGroup

COEF = 0.5
Gradient = dict[str, torch.Tensor]


def config_of(folder: Path, *words: str, batch_size: int = 6) -> RunConfig:
    mixed = ("path=rows", f"coef={COEF}", f"batch_size={batch_size}")
    return tiny_config(folder, *(f"algorithm.supervised.{word}" for word in mixed), "num_steps=5", *words)


def update(
    config: RunConfig, groups: Sequence[ScoredGroup], beside: Sequence[ScoredGroup] = ()
) -> tuple[Gradient, dict[str, float]]:
    """The gradient that one update saw, and its metrics."""
    learner = connected_learner(config, (250,))
    learner._optimizer.zero_grad = lambda: None
    metrics = learner.update(groups, 1, supervised=beside).metrics
    return {name: p.grad for name, p in learner._policy.model.named_parameters()}, dict(metrics)


def plain_loss(model, groups: Sequence[ScoredGroup]) -> torch.Tensor:
    """The mean of -log p over the trained tokens, by the model's own forward."""
    logprobs = [plain_logprobs(model, scored)[0] for scored in groups]
    masks = [torch.from_numpy(scored.group.trajectories[0].action_mask) for scored in groups]
    return -sum(lp[mask].sum() for lp, mask in zip(logprobs, masks, strict=True)) / sum(m.sum() for m in masks)


@pytest.mark.parametrize("words", [(), ("learner.tokens_per_microbatch=60",), ("learner.packing=false",)])
def test_the_gradient_is_that_of_the_policy_loss_and_of_plain_cross_entropy(folder, tokenizer, words) -> None:
    groups, beside = random_groups(tokenizer, 4, 3), rows(tokenizer, "sft", seed=4)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    loss = plain_loss(model, beside)
    (COEF * loss).backward()
    config = config_of(folder, "learner.max_grad_norm=1000000", *words)
    alone, without = update(config, groups)
    both, metrics = update(config, groups, beside)
    expected = dict(model.named_parameters())
    for name, gradient in both.items():
        extra = expected[name].grad
        wanted = alone[name] if extra is None else alone[name] + extra
        torch.testing.assert_close(gradient, wanted.to(gradient.dtype), atol=2e-6, rtol=2e-4)
    assert max((both[name] - alone[name]).abs().max().item() for name in both) > 1e-3
    assert metrics["supervised_loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert metrics["loss"] == pytest.approx(without["loss"] + COEF * loss.item(), abs=1e-5)
    assert metrics["policy_loss"] == pytest.approx(without["policy_loss"], abs=1e-6)
    assert "supervised_loss" not in without and metrics["num_tokens"] == without["num_tokens"]


def test_each_optimizer_step_has_rows_of_its_own_in_their_order(folder, tokenizer) -> None:
    """Two minibatches in two epochs take four parts of the rows; at a rate near 0 one model scores them all."""
    groups, beside = random_groups(tokenizer, 4, 3), rows(tokenizer, "sft", num=8, seed=4)
    beside[2:4] = [beside[2]] * 2  # the second part is unlike the others
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    expected = sum(plain_loss(model, beside[n : n + 2]).item() for n in range(0, 8, 2)) / 4
    words = ("algorithm.num_minibatches=2", "algorithm.num_epochs=2", "learner.learning_rate=1.0e-12")
    config = config_of(folder, *words, batch_size=2)
    assert config.algorithm.supervised_rows_per_step == 8
    metrics = connected_learner(config, (250,)).update(groups, 1, supervised=beside).metrics
    assert metrics["supervised_loss"] == pytest.approx(expected, abs=1e-4)
    assert metrics["optimizer_steps"] == 4


class Source:
    """Rows in an endless order, by their place."""

    def __init__(self, tokenizer) -> None:
        self.cursor = 0
        self._rows = rows(tokenizer, "sft", num=11, seed=9)

    def next(self) -> ScoredGroup:
        self.cursor += 1
        return self._rows[(self.cursor - 1) % 11]

    def restore(self, cursor: int, pending: Sequence[str]) -> None:
        self.cursor = cursor


class Run:
    """One process's part of a run: a learner with its supervised rows."""

    def __init__(self, config: RunConfig, tokenizer) -> None:
        self.rows = SupervisedRows(Source(tokenizer), by_value, rows_per_step=3, total_steps=5)
        self.learner = Learner(config, 0, 1, (250,))
        self.group = LearnerGroup(lambda: [LocalHandle(self.learner)], config.timeouts, by_value, self.rows)

    def weights(self) -> Gradient:
        return copied(self.learner)


def by_value(value: object) -> object:
    return value


async def test_a_run_goes_on_bit_for_bit_after_a_restart_and_after_a_repeated_step(folder, tokenizer, tmp_path) -> None:
    config = config_of(folder, batch_size=3)
    steps = [random_groups(tokenizer, 3, 2, seed=n) for n in range(5)]
    whole = Run(config, tokenizer)
    await whole.group.start()
    losses = []
    for version, groups in enumerate(steps, start=1):
        losses.append((await whole.group.update(groups)).metrics["supervised_loss"])
        if version == 2:
            state = whole.rows.state()
            await whole.group.save(tmp_path / "state")
            await whole.group.finish_save()
    expected = whole.weights()
    assert state == {"cursor": 6} and len(set(losses)) == 5, "every step has other rows"

    resumed = Run(config, tokenizer)
    await resumed.group.start()
    resumed.rows.restore(2, state)
    assert await resumed.group.load(tmp_path / "state") == 2
    again = [(await resumed.group.update(groups)).metrics["supervised_loss"] for groups in steps[2:]]
    assert again == losses[2:]
    assert all(torch.equal(tensor, expected[name]) for name, tensor in resumed.weights().items())

    assert await whole.group.load(tmp_path / "state") == 2, "as after the loss of a rank: steps are repeated"
    repeated = [(await whole.group.update(groups)).metrics["supervised_loss"] for groups in steps[2:]]
    assert repeated == losses[2:]
    assert all(torch.equal(tensor, expected[name]) for name, tensor in whole.weights().items())


async def test_rows_read_ahead_are_not_counted_as_taken(tokenizer) -> None:
    found = SupervisedRows(Source(tokenizer), by_value, rows_per_step=3, total_steps=5)
    await found.of(1)
    await asyncio.sleep(0.05)
    assert found.state() == {"cursor": 3}

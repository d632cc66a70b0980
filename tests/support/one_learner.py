"""A learner of one process: what it is given, its weights, and the gradient of one of its steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from learner_data import with_logprobs

from mobula.actors.reference.scorer import ReferenceScorer
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.configs.schema import RunConfig
from mobula.learner.examples import SharedExample, StoredExample, stored_examples
from mobula.learner.learner import Learner

Tensors = dict[str, torch.Tensor]
UNCLIPPED = "learner.max_grad_norm=1000000"


def connected_learner(
    config: RunConfig, banned_ids: tuple[int, ...] = (), template_ids: tuple[int, ...] = ()
) -> Learner:
    learner = Learner(config, 0, 1, banned_ids, template_ids)
    learner.connect("")
    return learner


def saved(learner: Learner, folder: Path) -> Path:
    """The folder, with the whole state of the learner."""
    learner.save(folder)
    learner.finish_save()
    return folder


def copied(learner: Learner) -> Tensors:
    """The learner's weights of now, by checkpoint name."""
    return {name: tensor.clone() for name, tensor in learner.outgoing.merged(learner.backend)}


def largest_difference(a: Tensors, b: Tensors) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def largest(tensors: Tensors) -> float:
    return max(tensor.abs().max().item() for tensor in tensors.values())


def gradient_of(
    learner: Learner, groups: Sequence[ScoredGroup], version: int = 1, **more: Any
) -> tuple[Tensors, dict[str, float]]:
    """The gradient that one update saw, of each trained parameter, and its metrics."""
    learner._optimizer.zero_grad = lambda: None
    metrics = learner.update(groups, version, **more).metrics
    return {name: p.grad for name, p in learner.policy.named_parameters() if p.requires_grad}, dict(metrics)


def scorer_of(config: RunConfig, folder: Path, banned_ids: tuple[int, ...] = ()) -> ReferenceScorer:
    """A scorer of the policy in `folder`."""
    scorer = ReferenceScorer(config, banned_ids)
    scorer.load(folder)
    return scorer


def as_sampled(scorer: ReferenceScorer, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
    """The groups as if the scorer's policy had sampled them; it is their reference too."""
    pairs = zip(groups, scorer.score(groups), strict=True)
    return [dataclasses.replace(with_logprobs(g, rows), reference_logprobs=rows) for g, rows in pairs]


def at_hand(examples: Sequence[SharedExample]) -> list[StoredExample]:
    """Examples of a warm start by value, as a learner's ranks take them."""
    return stored_examples(examples, lambda example: example)

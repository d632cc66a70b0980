"""A learner of one process, and its weights."""

from __future__ import annotations

import torch

from mobula.configs.schema import RunConfig
from mobula.learner.learner import Learner


def connected_learner(
    config: RunConfig, banned_ids: tuple[int, ...] = (), template_ids: tuple[int, ...] = ()
) -> Learner:
    learner = Learner(config, 0, 1, banned_ids, template_ids)
    learner.connect("")
    return learner


def copied(learner: Learner) -> dict[str, torch.Tensor]:
    """The learner's weights of now, by checkpoint name."""
    return {name: tensor.clone() for name, tensor in learner._outgoing.merged(learner._backend)}


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)

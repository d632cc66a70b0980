"""A forward pass over a step before it is trained: log-probs and entropies of the weights that the step trains from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch.distributed as dist

from learner.backends.base import Backend
from learner.batch import LearnerItem
from learner.gradient_step import GradientStep
from learner.policies.base import PolicyOutput

S = TypeVar("S")
Scores = dict[int, tuple[np.ndarray, np.ndarray]]
"""Index of an item -> its log-probs and entropies, float32 [T] each."""


class ScoringPass:
    """Scores a step's tokens, each rank a share, and hands every rank the scores of all. Collective.

    Which rank trains a row changes from minibatch to minibatch, so every rank needs the scores of every row: 8 bytes a
    token.
    """

    def __init__(
        self, backend: Backend, step: GradientStep, forward: Callable[[Sequence[LearnerItem]], PolicyOutput]
    ) -> None:
        self._backend = backend
        self._step = step
        self._forward = forward

    def __call__(self, groups: list[list[LearnerItem]]) -> list[list[LearnerItem]]:
        """The same items with `old_logprobs` and `entropies`."""
        scores = gathered(self._own([item for group in groups for item in group]))
        return [[_scored(item, scores) for item in group] for group in groups]

    def _own(self, items: Sequence[LearnerItem]) -> Scores:
        scores: Scores = {}
        with self._backend.inference():
            for rows in self._step.shares(items):
                output = self._forward(rows)
                both = zip(rows, output.logprobs.cpu().numpy(), output.entropy.cpu().numpy(), strict=True)
                for row, logprobs, entropies in both:
                    end = row.sequence.num_targets
                    scores[row.index] = (logprobs[:end].copy(), entropies[:end].copy())
        return scores


def unscored(groups: list[list[LearnerItem]]) -> list[list[LearnerItem]]:
    """In the place of a ScoringPass where nothing reads its scores."""
    return groups


def _scored(item: LearnerItem, scores: Scores) -> LearnerItem:
    logprobs, entropies = scores[item.index]
    return replace(item, old_logprobs=logprobs, entropies=entropies)


def gathered(own: dict[int, S]) -> dict[int, S]:
    """The scores of all ranks together, by the index of an item. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return own
    parts: list[dict[int, S]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, own)
    return {index: score for part in parts for index, score in part.items()}

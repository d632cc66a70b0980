"""Forward passes before a training step: log-probs and entropies of the weights that the step trains from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch.distributed as dist
from torch import Tensor, nn

from mobula.learner.backends.base import Backend
from mobula.learner.batch import LearnerItem
from mobula.learner.gradient_step import GradientStep
from mobula.learner.policies.adapters import without_adapters
from mobula.learner.policies.base import PolicyOutput
from mobula.learner.policies.flow.policy import CleanSequence, LatentSequence

FlowRow = LatentSequence | CleanSequence
S = TypeVar("S")
Scores = dict[int, tuple[np.ndarray, np.ndarray, np.ndarray | None]]
"""Index of an item -> its log-probs and entropies, float32 [T] each, and what a flow model predicted, float32 [N, ...].
"""


class ScoringPass:
    """Scores a step's tokens: each rank computes a share and receives the scores of all ranks. Collective.

    With `keeps_predictions` rows of a flow model also get its predictions, for losses that compare with them.

    A row may move to another rank in each minibatch, so every rank needs the scores of every row: 8 bytes a token.
    """

    def __init__(
        self,
        backend: Backend,
        step: GradientStep,
        forward: Callable[[Sequence[LearnerItem]], PolicyOutput],
        *,
        keeps_predictions: bool,
    ) -> None:
        self._keeps_predictions = keeps_predictions
        self._backend = backend
        self._step = step
        self._forward = forward

    def __call__(self, groups: list[list[LearnerItem]]) -> list[list[LearnerItem]]:
        """Returns the items with `old_logprobs` and `entropies`."""
        scores = gathered(self._own([item for group in groups for item in group]))
        return [[with_scores(item, scores) for item in group] for group in groups]

    def _own(self, items: Sequence[LearnerItem]) -> Scores:
        scores: Scores = {}
        with self._backend.inference():
            for rows in self._step.shares(items):
                output = self._forward(rows)
                parts = (output.logprobs.cpu().numpy(), output.entropy.cpu().numpy(), self._predicted(rows, output))
                for row, logprobs, entropies, predicted in zip(rows, *parts, strict=True):
                    end = row.sequence.num_targets
                    scores[row.index] = (logprobs[:end].copy(), entropies[:end].copy(), predicted)
        return scores

    def _predicted(self, rows: Sequence[LearnerItem], output: PolicyOutput) -> Sequence[np.ndarray | None]:
        """Returns the predictions of each row; None without `keeps_predictions`."""
        if not self._keeps_predictions:
            return [None] * len(rows)
        assert isinstance(output.predicted, Tensor), "only flow models predict what such losses compare with"
        flow = [row.sequence for row in rows if isinstance(row.sequence, FlowRow)]
        parts = output.predicted.float().cpu().split([row.num_predictions for row in flow])
        return [part.numpy().copy() for part in parts]


class ReferencePass:
    """Scores a step with the policy without adapters, the reference of a run that starts from the checkpoint. Each rank
    computes a share and receives the log-probs of all ranks. Collective."""

    def __init__(
        self,
        backend: Backend,
        step: GradientStep,
        forward: Callable[[Sequence[LearnerItem]], PolicyOutput],
        model: nn.Module,
    ) -> None:
        self._backend = backend
        self._step = step
        self._forward = forward
        self._model = model

    def __call__(self, groups: list[list[LearnerItem]]) -> list[list[LearnerItem]]:
        """Returns the items with `reference_logprobs`."""
        own: dict[int, np.ndarray] = {}
        # Re-enable adapters after resharding: gathered parameters are not the tensors that the optimizer holds.
        with without_adapters(self._model), self._backend.inference():
            for rows in self._step.shares([item for group in groups for item in group]):
                logprobs = self._forward(rows).logprobs.cpu().numpy()
                own |= {row.index: found[: row.sequence.num_targets] for row, found in zip(rows, logprobs, strict=True)}
        scores = gathered({index: found.copy() for index, found in own.items()})
        return [[replace(item, reference_logprobs=scores[item.index]) for item in group] for group in groups]


def unscored(groups: list[list[LearnerItem]]) -> list[list[LearnerItem]]:
    """Returns the groups unchanged; replaces a ScoringPass or ReferencePass if nothing reads the scores."""
    return groups


def with_scores(item: LearnerItem, scores: Scores) -> LearnerItem:
    """Returns the item with its scores; predictions of a flow model are kept by the rank that trains the row."""
    logprobs, entropies, predicted = scores[item.index]
    sequence = item.sequence
    if predicted is not None and isinstance(sequence, FlowRow):
        sequence = sequence.with_old(predicted)
    return replace(item, sequence=sequence, old_logprobs=logprobs, entropies=entropies)


def gathered(own: dict[int, S]) -> dict[int, S]:
    """Returns the scores of all ranks by item index. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return own
    parts: list[dict[int, S]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, own)
    return {index: score for part in parts for index, score in part.items()}

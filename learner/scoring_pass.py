"""Forward passes before a training step: log-probs and entropies of the weights that the step trains from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

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
Groups = list[list[LearnerItem]]
Forward = Callable[[Sequence[LearnerItem]], PolicyOutput]
S = TypeVar("S")
Scores = dict[int, tuple[np.ndarray, np.ndarray, np.ndarray | None]]
"""Index of an item -> its log-probs and entropies, float32 [T] each, and what a flow model predicted, float32 [N, ...].
"""


def scores_of(
    rows: Sequence[Any], backend: Backend, step: GradientStep, score: Callable[[Sequence[Any]], Iterable[S]]
) -> dict[int, S]:
    """Returns the scores of all rows by their index. Each rank computes a share. Collective.

    A row may move to another rank in each minibatch, so every rank needs the scores of every row.

    Args:
        score: the scores of the rows of a micro-batch, in order.
    """
    own: dict[int, S] = {}
    with backend.inference():
        for share in step.shares(rows):
            own |= {row.index: found for row, found in zip(share, score(share), strict=True)}
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return own
    parts: list[dict[int, S]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, own)
    return {index: score for part in parts for index, score in part.items()}


def scored(
    groups: Groups, backend: Backend, step: GradientStep, forward: Forward, *, keeps_predictions: bool
) -> Groups:
    """Returns the items with `old_logprobs` and `entropies`. Collective.

    With `keeps_predictions` rows of a flow model also get its predictions, for losses that compare with them.
    """

    def score(rows: Sequence[LearnerItem]) -> Iterable[tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
        output = forward(rows)
        predicted = _predicted(rows, output) if keeps_predictions else [None] * len(rows)
        parts = (output.logprobs.cpu().numpy(), output.entropy.cpu().numpy(), predicted)
        for row, logprobs, entropies, own in zip(rows, *parts, strict=True):
            end = row.sequence.num_targets
            yield logprobs[:end].copy(), entropies[:end].copy(), own

    scores: Scores = scores_of([item for group in groups for item in group], backend, step, score)
    return [[with_scores(item, scores) for item in group] for group in groups]


def referred(groups: Groups, backend: Backend, step: GradientStep, forward: Forward, model: nn.Module) -> Groups:
    """Returns the items with `reference_logprobs`: those of the policy without adapters, the reference of a run that
    starts from the checkpoint. Collective."""

    def score(rows: Sequence[LearnerItem]) -> Iterable[np.ndarray]:
        logprobs = forward(rows).logprobs.cpu().numpy()
        return [found[: row.sequence.num_targets].copy() for row, found in zip(rows, logprobs, strict=True)]

    # Adapters come back after resharding: gathered parameters are not the tensors that the optimizer holds.
    with without_adapters(model):
        scores = scores_of([item for group in groups for item in group], backend, step, score)
    return [[replace(item, reference_logprobs=scores[item.index]) for item in group] for group in groups]


def unscored(groups: Groups) -> Groups:
    """Returns the groups unchanged; replaces `scored` or `referred` if nothing reads the scores."""
    return groups


def _predicted(rows: Sequence[LearnerItem], output: PolicyOutput) -> Sequence[np.ndarray]:
    assert isinstance(output.predicted, Tensor), "only flow models predict what such losses compare with"
    flow = [row.sequence for row in rows if isinstance(row.sequence, FlowRow)]
    parts = output.predicted.float().cpu().split([row.num_predictions for row in flow])
    return [part.numpy().copy() for part in parts]


def with_scores(item: LearnerItem, scores: Scores) -> LearnerItem:
    """Returns the item with its scores; predictions of a flow model are kept by the rank that trains the row."""
    logprobs, entropies, predicted = scores[item.index]
    sequence = item.sequence
    if predicted is not None and isinstance(sequence, FlowRow):
        sequence = sequence.with_old(predicted)
    return replace(item, sequence=sequence, old_logprobs=logprobs, entropies=entropies)

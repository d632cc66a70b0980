"""What an update measures: movement of weights, log-prob gap of fresh samples."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mobula.cluster.records.trajectory import TrajectoryGroup
from mobula.cluster.runtime.object_store import fetch_or_miss
from mobula.learner.backends.base import Backend
from mobula.learner.batch import LearnerBatch, LearnerItem
from mobula.learner.meter import Meter
from mobula.learner.optim import local
from mobula.learner.policies.base import PolicyOutput
from mobula.learner.policies.batch import pad_rows
from mobula.learner.shares import all_ranks

Score = Callable[[TrajectoryGroup], Tensor]
"""Log-probs of a group's tokens by the weights that the step trains from, float32 [B, T]."""
_logger = logging.getLogger(__name__)


def measure_fresh_gap(reference: Any, version: int, meter: Meter, score: Score, timeout_s: float) -> None:
    """Fetches the group of `reference` and measures `logprob_gap_*` on its tokens of `version`, from which a step
    trains. Every rank scores all of it. Collective.

    A step without fresh samples, because their engine died, has no gap.
    """
    group: TrajectoryGroup | None = None
    try:
        [group] = fetch_or_miss([reference], timeout_s=timeout_s, what="fresh samples")
    except Exception as error:  # whatever became of the engine: it has no part in the update
        _logger.warning("no fresh samples: %s", error)
    has_all = all(all_ranks(group is not None)) if dist.is_initialized() else group is not None
    if group is None or not has_all:
        return
    trajectories = group.trajectories
    behavior = torch.from_numpy(pad_rows([t.behavior_logprobs for t in trajectories], 0, np.float32))
    current = pad_rows([t.action_mask & (t.weight_versions == version) for t in trajectories], 0, np.bool_)
    gaps = (score(group).cpu() - behavior).abs()[torch.from_numpy(current)]
    if len(gaps) > 0:
        meter.add_shared(logprob_gap_mean=gaps.mean())
        meter.keep_max(logprob_gap_max=gaps.max())


NUM_LOOKS = 48  # steps of a run that are measured, so that the cost of long runs does not grow
NUM_ROWS = 4  # of a rank, scored before and after the step
NUM_ELEMENTS = 1024  # of each tensor of a rank

SUMS = {
    "policy_change": ("moved_logprobs", "moved_tokens"),
    "logprob_gap_first": ("gap_first", "num_first"),
    "logprob_gap_last": ("gap_last", "num_last"),
    "logprob_gap_template": ("gap_template", "num_template"),
}
"""Metric -> the sums over ranks that it is the ratio of."""


Forward = Callable[[Sequence[LearnerItem]], tuple[PolicyOutput, LearnerBatch]]


@dataclass(eq=False)
class Movement:
    """Measures `policy_change` and `weight_change` of some steps. Its methods are collective.

    `policy_change` is the mean |difference| of the log-probs of a few trained tokens before and after the step, in nat;
    `weight_change` is |change| / |weights| over a sample of the trained weights. Neither depends on the optimizer.

    Example:
        movement.begin(rows, version)
        ...  # optimizer steps
        movement.end(meter)
    """

    backend: Backend
    shares: Callable[[Sequence[LearnerItem]], Sequence[Sequence[LearnerItem]]]  # as `GradientStep.shares`
    forward: Forward
    num_steps: int
    _rows: Sequence[LearnerItem] = field(default=(), init=False)
    _before: tuple[Tensor, Tensor] | None = field(default=None, init=False)  # sampled weights [N], log-probs [B, T]

    def begin(self, rows: Sequence[LearnerItem], version: int) -> None:
        """Looks at the state before the step that makes `version`; `rows` are those of its first minibatch."""
        self._before = None
        if rows and version % max(1, self.num_steps // NUM_LOOKS) == 0:
            self._rows = self.shares(rows)[0][:NUM_ROWS]
            self._before = self._sampled(), self._score(self._rows)[0]

    def end(self, meter: Meter) -> None:
        """Adds the differences to `meter`, if `begin` looked."""
        if self._before is None:
            return
        weights, logprobs = self._before
        after, mask = self._score(self._rows)
        moved = torch.where(mask, (after - logprobs).abs(), 0.0)
        meter.add(moved_logprobs=moved.sum(), moved_tokens=mask.sum().float())
        meter.add(moved_weights=(self._sampled() - weights).square().sum(), square_weights=weights.square().sum())
        self._before, self._rows = None, ()

    def _score(self, rows: Sequence[LearnerItem]) -> tuple[Tensor, Tensor]:
        """Returns log-probs, float32 [B, T], and the mask of trained tokens, bool [B, T]."""
        with self.backend.inference():
            output, batch = self.forward(rows)
        return output.logprobs, batch.loss_mask

    @torch.no_grad()
    def _sampled(self) -> Tensor:
        return torch.cat(list(_samples(self.backend.trained())))


def ratios(reduced: dict[str, float]) -> dict[str, float]:
    """Takes the sums of `Movement` and of `measure_gap` out of `reduced` and returns the metrics that they give."""
    found = {}
    for name, (part, whole) in SUMS.items():
        total, num = reduced.pop(part, 0.0), reduced.pop(whole, 0.0)
        if num > 0:
            found[name] = total / num
    moved, squares = reduced.pop("moved_weights", 0.0), reduced.pop("square_weights", 0.0)
    if squares > 0:
        found["weight_change"] = (moved / squares) ** 0.5
    return found


def _samples(tensors: Mapping[str, Tensor]) -> Iterator[Tensor]:
    for tensor in local(tensors.values()):
        flat = tensor.detach().reshape(-1)
        yield flat[:: max(1, flat.numel() // NUM_ELEMENTS)].float().clone()

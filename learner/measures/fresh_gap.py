"""Measures the log-prob gap on fresh responses if all tokens of a step come from older weights."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mobula.cluster.records.trajectory import TrajectoryGroup
from mobula.cluster.runtime.object_store import fetch_or_miss
from mobula.learner.meter import Meter
from mobula.learner.policies.batch import pad_rows
from mobula.learner.shares import all_ranks

Score = Callable[[TrajectoryGroup], Tensor]
"""Log-probs of a group's tokens by the weights that the step trains from, float32 [B, T]."""

_logger = logging.getLogger(__name__)


class FreshGap:
    """Measures `logprob_gap_*` on a group of the version that a step trains from. Every rank scores all of it."""

    def __init__(self, score: Score, timeout_s: float) -> None:
        self._score = score
        self._timeout_s = timeout_s

    def measure(self, reference: Any, version: int, meter: Meter) -> None:
        """Fetches the group of `reference` and compares its tokens of `version`. Collective.

        A step without fresh samples, because their engine died, has no gap.
        """
        group = self._fetched(reference)
        if group is None:
            return
        trajectories = group.trajectories
        behavior = torch.from_numpy(pad_rows([t.behavior_logprobs for t in trajectories], 0, np.float32))
        current = pad_rows([t.action_mask & (t.weight_versions == version) for t in trajectories], 0, np.bool_)
        is_current = torch.from_numpy(current)
        gaps = (self._score(group).cpu() - behavior).abs()[is_current]
        if len(gaps) > 0:
            meter.add_shared(logprob_gap_mean=gaps.mean())
            meter.keep_max(logprob_gap_max=gaps.max())

    def _fetched(self, reference: Any) -> TrajectoryGroup | None:
        """Returns the group; None on every rank if any rank cannot fetch it."""
        try:
            [group] = fetch_or_miss([reference], timeout_s=self._timeout_s, what="fresh samples")
        except Exception as error:  # whatever became of the engine: it has no part in the update
            _logger.warning("no fresh samples: %s", error)
            group = None
        has_all = all(all_ranks(group is not None)) if dist.is_initialized() else group is not None
        return group if has_all else None

"""Selects the items of a step that each rank trains or scores."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Literal

from mobula.configs.schema import RunConfig
from mobula.learner.batch import LearnerItem, minibatches_of, without_overlong
from mobula.learner.critic.rows import ValueRow
from mobula.learner.gradient_step import shares_of_ranks

Role = Literal["learner", "critic"]


def wanted_by_rank(
    groups: list[list[LearnerItem]], config: RunConfig, version: int, num_ranks: int, role: Role = "learner"
) -> list[set[int]]:
    """For each rank of a role the indices of the items that it trains or scores, with policy and critic, in the step
    that makes `version`; rows that only keep step with other ranks are among them.
    """
    algorithm = config.algorithm
    everything = list(chain.from_iterable(groups))
    parts = minibatches_of(without_overlong(groups, algorithm), algorithm, (config.seed, version))
    is_reference = config.reference.place == "learner_ranks"
    passes: list[Sequence[LearnerItem] | Sequence[ValueRow]] = []
    if role == "learner":
        passes += [*parts, *([everything] if algorithm.needs_scoring_pass or is_reference else [])]
    if role == "critic" or algorithm.critic.place == "learner_ranks":
        passes += [[ValueRow.of(item) for item in rows] for rows in (everything, *parts)]
    wanted: list[set[int]] = [set() for _ in range(num_ranks)]
    for rows in passes:
        for own, shares in zip(wanted, shares_of_ranks(rows, config.learner, num_ranks), strict=True):
            own.update(row.index for share in shares for row in share)
    return wanted

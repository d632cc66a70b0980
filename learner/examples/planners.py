"""Planners: plan the references that each learner rank receives in a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from mobula.configs.schema import RunConfig
from mobula.learner.examples.entries import StoredExample, portions_of_examples, rows_planner
from mobula.learner.examples.examples import answer_row, end_row
from mobula.learner.shares import Planner, Portion, planner_of

ExamplesPlanner = Callable[[Sequence[StoredExample], int], tuple[Sequence[StoredExample], Sequence[Portion]]]
"""(examples, ranks) -> examples without references, and the portion of each rank."""


@dataclass(frozen=True)
class Planners:
    """The planners of a learner group. None: every rank receives all references."""

    groups: Planner | None = None  # of an RL step, or the rows of an offline job
    supervised: Planner | None = None  # rows of `algorithm.supervised`
    examples: ExamplesPlanner | None = None  # of the warm start


NO_PLANNERS = Planners()


def planners_of(config: RunConfig) -> Planners:
    """Returns the planners of a run."""
    if config.offline.is_on:
        return Planners(rows_planner(config, end_row if config.offline.job == "reward_model" else answer_row))
    return Planners(
        planner_of(config),
        rows_planner(config, answer_row, config.algorithm.supervised.batch_size),
        partial(portions_of_examples, config=config.learner),
    )

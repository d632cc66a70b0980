"""Assigns the groups of a step to ranks. Each rank fetches its share and receives outlines of the other groups."""

from __future__ import annotations

from mobula.learner.shares.portions import Planner, Portion, as_argument, in_portions
from mobula.learner.shares.share_fetcher import Exchange, ShareFetcher, all_ranks
from mobula.learner.shares.step_groups import StepGroups, planner_of

__all__ = [
    "Exchange",
    "Planner",
    "Portion",
    "ShareFetcher",
    "StepGroups",
    "all_ranks",
    "as_argument",
    "in_portions",
    "planner_of",
]

"""How what a step trains is shared out among the ranks: each fetches its share, and knows what credit reads."""

from __future__ import annotations

from mobula.learner.shares.share_fetcher import Exchange, ShareFetcher, all_ranks
from mobula.learner.shares.step_groups import StepGroups

__all__ = ["Exchange", "ShareFetcher", "StepGroups", "all_ranks"]

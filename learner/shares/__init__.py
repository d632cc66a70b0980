"""How a step's groups are shared out among the ranks: each fetches what it trains, and knows what credit reads."""

from __future__ import annotations

from learner.shares.step_fetcher import Exchange, StepFetcher, all_ranks

__all__ = ["Exchange", "StepFetcher", "all_ranks"]

"""The sign `language`: responses mix scripts."""

from __future__ import annotations

from mobula.cluster.guard.signs.drift import Drift
from mobula.cluster.guard.windows import Quantity


def language(limit: float) -> Drift:
    """The share of letters outside the response's most frequent script rises by more than `limit`."""
    return Drift("language", Quantity.SCRIPT_MIX, rise=limit, fall=None, ratio=False)

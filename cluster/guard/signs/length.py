"""The sign `length`: responses become longer or shorter than a ratio allows."""

from __future__ import annotations

from mobula.cluster.guard.signs.drift import Drift
from mobula.cluster.guard.windows import Quantity


def length(limit: float) -> Drift:
    """Mean tokens above `limit` times, or below 1 / `limit` of, those of the first window; `limit` > 1."""
    return Drift("length", Quantity.LENGTH, rise=limit - 1, fall=1 - 1 / limit, ratio=True)

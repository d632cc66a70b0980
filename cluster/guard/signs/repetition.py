"""The sign `repetition`: responses repeat themselves."""

from __future__ import annotations

from mobula.cluster.guard.signs.drift import Drift
from mobula.cluster.guard.windows import Quantity


def repetition(limit: float) -> Drift:
    """The share of repeated n-grams rises by more than `limit`."""
    return Drift("repetition", Quantity.REPETITION, rise=limit, fall=None, ratio=False)

"""The sign `format`: fewer responses have the shape that the reward's `format` components ask for."""

from __future__ import annotations

from mobula.cluster.guard.signs.drift import Drift
from mobula.cluster.guard.windows import Quantity


def format_share(limit: float) -> Drift:
    """The mean of the components with function `format` falls by more than `limit`."""
    return Drift("format", Quantity.FORMAT, rise=None, fall=limit, ratio=False)

"""Signs of reward hacking. One sign a file; `guard.limits` switches those of drift on."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mobula.cluster.guard.signs.base import Sign, SignVerdict
from mobula.cluster.guard.signs.divergence import Divergence
from mobula.cluster.guard.signs.drift import Drift
from mobula.cluster.guard.signs.format import format_share
from mobula.cluster.guard.signs.language import language
from mobula.cluster.guard.signs.length import length
from mobula.cluster.guard.signs.repetition import repetition

DRIFTS: Mapping[str, Callable[[float], Drift]] = {
    "length": length,
    "repetition": repetition,
    "language": language,
    "format": format_share,
}
"""Name of a sign, a key of `guard.limits` -> the sign with that limit."""

__all__ = ["DRIFTS", "Divergence", "Drift", "Sign", "SignVerdict"]

"""Advantages of turns, from what the turns of all siblings earned; one formula a file."""

from __future__ import annotations

from mobula.learner.algorithms.turn_advantages.inputs import StepTurns, TurnAdvantage
from mobula.learner.algorithms.turn_advantages.return_to_go import return_to_go

TURN_ADVANTAGES: dict[str, TurnAdvantage] = {"return_to_go": return_to_go}

__all__ = ["TURN_ADVANTAGES", "StepTurns", "TurnAdvantage"]

"""Advantages of tokens, from their rewards and a critic's values. One formula a file; `algorithm.advantage` chooses."""

from __future__ import annotations

from mobula.learner.algorithms.token_advantages.gae import gae
from mobula.learner.algorithms.token_advantages.inputs import TokenAdvantage, TokenCredit, TokenValues
from mobula.learner.algorithms.token_advantages.turn_gae import turn_gae

TOKEN_ADVANTAGES: dict[str, TokenAdvantage] = {"gae": gae, "turn_gae": turn_gae}

__all__ = ["TOKEN_ADVANTAGES", "TokenAdvantage", "TokenCredit", "TokenValues"]

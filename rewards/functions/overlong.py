"""Overlong: a penalty that grows over the last tokens before the limit."""

from __future__ import annotations

from mobula.rewards.contract import RewardRequest, Score
from mobula.rewards.functions.parsing.references import check_number
from mobula.rewards.tools import Tools


class Overlong:
    """The soft overlong punishment of DAPO (Yu et al. 2025, equation 13), from 0 down to -`penalty`.

    With L tokens, L_max = `max_tokens` and B = `buffer_tokens`: min(0, -penalty * (L - (L_max - B)) / B), at least
    -penalty. A truncated response of any length gets -penalty.
    """

    def __init__(self, tools: Tools, *, max_tokens: int, buffer_tokens: int, penalty: float) -> None:
        check_number("max_tokens", max_tokens, low=1)
        check_number("buffer_tokens", buffer_tokens, low=1, high=max_tokens)
        check_number("penalty", penalty, low=0)
        self._free_tokens = max_tokens - buffer_tokens
        self._buffer_tokens = buffer_tokens
        self._penalty = penalty

    def __call__(self, request: RewardRequest) -> Score:
        if request.response.is_truncated:
            return Score(-self._penalty, "cut off")
        share = (request.response.num_tokens - self._free_tokens) / self._buffer_tokens
        if share <= 0:
            return Score(0.0)
        return Score(-self._penalty * min(1.0, share), f"{request.response.num_tokens} tokens")

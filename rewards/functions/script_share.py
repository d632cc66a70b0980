"""ScriptShare: the share of characters of a response in a Unicode range."""

from __future__ import annotations

from collections.abc import Sequence

from mobula.rewards.contract import RewardRequest, Score
from mobula.rewards.tools import Tools

LAST_CODE_POINT = 0x10FFFF


class ScriptShare:
    """The share of characters with a code point in `code_points` [first, last]; 0 for an empty response.

    The CJK ideographs, [19968, 40959], with a weight of -0.1 are the language penalty of MAYE (arXiv:2504.02587).
    """

    def __init__(self, tools: Tools, *, code_points: Sequence[int]) -> None:
        fits = len(code_points) == 2 and all(isinstance(c, int) and not isinstance(c, bool) for c in code_points)
        if not fits or not 0 <= code_points[0] <= code_points[1] <= LAST_CODE_POINT:
            raise ValueError(
                f"code_points={list(code_points)!r} is unfit: "
                "give the first and the last code point, e.g. [19968, 40959]"
            )
        self._first, self._last = code_points

    def __call__(self, request: RewardRequest) -> Score:
        text = request.response.text
        num_inside = sum(self._first <= ord(character) <= self._last for character in text)
        return Score(num_inside / len(text) if text else 0.0)

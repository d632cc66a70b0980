"""The reflection component: MAYE's words between word boundaries, or inside other words as published."""

from __future__ import annotations

from typing import Any

import pytest

from mobula.cluster.records.trajectory import Response
from mobula.rewards.contract import RewardRequest, Score, evaluate
from mobula.rewards.functions import build_function
from mobula.rewards.isolation.process import IsolatedProcess
from mobula.rewards.tools import Tools

TOOLS = Tools(IsolatedProcess(timeout_s=1, start_timeout_s=1), "cpu", "float32")


def score(text: str, **options: Any) -> Score:
    request = RewardRequest(Response(text, num_tokens=1, is_truncated=False), (), {}, "")
    return evaluate(build_function("reflection", options, TOOLS), request)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Wait, that is 4.", "wait 1"),
        ("I re-check it. Let me re-check and verify.", "re-check 2, verify 1"),
        ("Let me check again.\nYET it holds", "check again 1, yet 1"),
        ("After a reevaluation", "reevaluation 1"),
    ],
)
def test_a_word_counts_in_any_case(text: str, reason: str) -> None:
    assert score(text) == Score(1.0, reason)


@pytest.mark.parametrize("text", ["awaiting the yeti", "verifying", "", "The answer is 4."])
def test_a_word_inside_another_counts_only_as_published(text: str) -> None:
    assert score(text) == Score(0.0, "")
    assert score(text, whole_words=False).value == float(any(word in text for word in ("wait", "yet", "verify")))


@pytest.mark.parametrize("words", ["wait", [], ["wait", ""], [3]])
def test_words_that_are_none_are_refused(words: Any) -> None:
    with pytest.raises(ValueError, match="words="):
        score("wait", words=words)

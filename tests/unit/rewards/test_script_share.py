"""The share of characters in a range of code points, and MAYE's published reward made of it."""

from __future__ import annotations

import pytest

from mobula.cluster.records.trajectory import Response
from mobula.configs.load import load_config
from mobula.rewards.contract import RewardRequest, evaluate
from mobula.rewards.functions import build_function
from mobula.rewards.isolation.process import IsolatedProcess
from mobula.rewards.tools import Tools

TOOLS = Tools(IsolatedProcess(timeout_s=10, start_timeout_s=60), "cpu", "float32")


def request(text: str, *, is_truncated: bool = False) -> RewardRequest:
    return RewardRequest(Response(text, 20, is_truncated, ()), (r"\boxed{7}",), {}, "")


@pytest.mark.parametrize(
    ("text", "share"),
    [("", 0.0), ("seven", 0.0), ("\u4e00\u9fff", 1.0), ("\u4dff\ua000", 0.0), ("7 is \u4e03\u5341\u4e2a", 3 / 8)],
)
def test_it_is_the_share_of_characters(text: str, share: float) -> None:
    function = build_function("script_share", {"code_points": [0x4E00, 0x9FFF]}, TOOLS)
    assert evaluate(function, request(text)).value == pytest.approx(share)


@pytest.mark.parametrize(
    ("text", "is_truncated", "reward"),
    [
        (r"<think>it is round</think> \boxed{7}", False, 2.0),
        (r"<think>a</think><think>b</think> \boxed{7}", False, 1.0),
        (r"\boxed{7}", False, 1.0),
        ("\u4e00" * 10, False, -0.1),
        (r"<think>it goes on", True, -0.1),
    ],
)
def test_mayes_published_reward(text: str, is_truncated: bool, reward: float) -> None:
    components = load_config(["experiment=digits", "rewards=maye_published"]).rewards.components
    values = {
        c.name: evaluate(build_function(c.function, c.options, TOOLS), request(text, is_truncated=is_truncated)).value
        for c in components
        if c.weight != 0
    }
    assert sum(c.weight * values[c.name] for c in components if c.weight != 0) == pytest.approx(reward)

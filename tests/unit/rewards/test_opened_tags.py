"""Tags that a prompt opens for its response count where rewards look for tags."""

from types import SimpleNamespace

import pytest

from mobula.cluster.records.trajectory import Response
from mobula.rewards.contract import RewardRequest
from mobula.rewards.functions.answers.exact_match import ExactMatch
from mobula.rewards.functions.format import Format

HEAD = "<|im_start|>user\nUse <think>.<|im_end|>\n<|im_start|>assistant\n"


def request(prompt: str, text: str) -> RewardRequest:
    return RewardRequest(Response(text, 3, False), ("7",), {}, prompt)


@pytest.mark.parametrize(
    ("prompt", "text", "value"),
    [
        (f"{HEAD}<think>\n", "hm\n</think><answer>7</answer>", 1.0),
        (f"{HEAD}<think>", "hm</think><answer>7</answer>", 1.0),
        ("<\uff5cAssistant\uff5c><think>\n", "hm</think><answer>7</answer>", 1.0),
        (f"{HEAD}<think>\n", "<think>hm</think><answer>7</answer>", 0.0),  # opened twice
        (f"{HEAD}<think>\n\n</think>\n\n", "<answer>7</answer>", 1.0),  # reasoning is off
        (HEAD, "hm</think><answer>7</answer>", 0.0),
        (HEAD, "<think>hm</think><answer>7</answer>", 1.0),
        ("Think in <think>", "<think>hm</think><answer>7</answer>", 1.0),  # a question that was not rendered
        (f"{HEAD}<scratch>\n", "<think>hm</think><answer>7</answer>", 1.0),  # no tag of the shape
    ],
)
def test_a_format_counts_the_tag_that_its_prompt_opens(prompt: str, text: str, value: float) -> None:
    assert Format(SimpleNamespace(isolated=None), preset="think_answer")(request(prompt, text)).value == value


@pytest.mark.parametrize(("preset", "text"), [("json", '{"a": 1}'), ("boxed", r"\boxed{7}")])
def test_other_shapes_are_those_of_the_response_alone(preset: str, text: str) -> None:
    shape = Format(SimpleNamespace(isolated=None), preset=preset)
    assert shape(request(f"{HEAD}<think>\n\n</think>\n\n", text)).value == 1.0


def test_an_answer_between_tags_may_be_opened_by_the_prompt() -> None:
    options = {"ignore_case": False, "whole_response": True}
    between = ExactMatch(SimpleNamespace(), extract="tags:answer", **options)
    assert between(request(f"{HEAD}<answer>", "7</answer>")).value == 1.0
    assert between(request(HEAD, "7</answer>")).value == 0.0
    assert ExactMatch(SimpleNamespace(), extract="whole", **options)(request(f"{HEAD}<think>\n", "7")).value == 1.0

"""Rewards of a few lines: episodes, JPEG size, named rules, reflection, scripts, opened tags."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mobula.cluster.errors import RewardError
from mobula.cluster.records.trajectory import EpisodeTurn, Response
from mobula.configs.load import load_config
from mobula.configs.overrides import groups
from mobula.rewards.components import RewardScoring
from mobula.rewards.contract import RewardRequest, Score, evaluate
from mobula.rewards.functions import BUILT_IN, build_function
from mobula.rewards.functions.plugin import EnvironmentReward
from mobula.rewards.functions.response_form import Format
from mobula.rewards.functions.short_answers import ExactMatch
from mobula.rewards.isolation.process import IsolatedProcess, Tools


def episode(*rewards: dict[str, float], failure: str = "") -> RewardRequest:
    turns = tuple(EpisodeTurn(n, n + 1, "go", "", parts, "none") for n, parts in enumerate(rewards))
    return RewardRequest(Response("go", 1, False, turns=turns, failure=failure), (), {}, "")


def test_turns_are_discounted_and_parts_are_shown() -> None:
    score = EnvironmentReward(None, discount=0.5)(episode({"a": 1.0}, {"a": 2.0, "b": 3.0}, {"b": 4.0}))
    assert score.value == 1.0 + 0.5 * 5.0 + 0.25 * 4.0
    assert score.breakdown == {"a": 2.0, "b": 2.5}


def test_a_failed_episode_is_not_worth_zero() -> None:
    with pytest.raises(RewardError, match="timed_out"):
        EnvironmentReward(None, discount=1.0)(episode({"a": 1.0}, failure="timed_out: waited 3 s"))


def test_a_response_of_one_turn_is_refused() -> None:
    with pytest.raises(RewardError, match="no episode"):
        EnvironmentReward(None, discount=1.0)(episode())


TOOLS = Tools(IsolatedProcess(timeout_s=10, start_timeout_s=60), "cpu", "float32")
FLAT = Image.new("RGB", (64, 64), (40, 90, 160))
NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))


def of_images(*images: Image.Image) -> RewardRequest:
    files = []
    for image in images:
        file = io.BytesIO()
        image.save(file, "PNG")
        files.append(file.getvalue())
    return RewardRequest(Response("", 1, False, tuple(files)), (), {}, "")


def kilobytes(image: Image.Image, quality: int) -> float:
    file = io.BytesIO()
    image.save(file, format="JPEG", quality=quality)
    return len(file.getvalue()) / 1000


def test_it_is_the_size_of_the_file_and_frames_count_by_their_mean() -> None:
    small = build_function("jpeg_size", {"wanted": "small", "quality": 95, "scale": 500.0}, TOOLS)
    large = build_function("jpeg_size", {"wanted": "large", "quality": 50, "scale": 1.0}, TOOLS)
    assert evaluate(small, of_images(NOISE)).value == pytest.approx(-kilobytes(NOISE, 95) / 500)
    assert evaluate(large, of_images(NOISE)).value == pytest.approx(kilobytes(NOISE, 50))
    both = (kilobytes(FLAT, 50) + kilobytes(NOISE, 50)) / 2
    assert evaluate(large, of_images(FLAT, NOISE)).value == pytest.approx(both)
    assert evaluate(small, of_images(FLAT)).value > 4 * evaluate(small, of_images(NOISE)).value


def test_a_response_without_an_image_or_with_a_damaged_one_has_no_reward() -> None:
    small = build_function("jpeg_size", {"wanted": "small", "quality": 95, "scale": 500.0}, TOOLS)
    with pytest.raises(RewardError, match="no image to compress"):
        evaluate(small, of_images())
    with pytest.raises(RewardError, match="image 1 of the response"):
        evaluate(small, RewardRequest(Response("", 1, False, (b"\x89PNG",)), (), {}, ""))


ANSWERS = tuple(f"mobula.rewards.functions.{name}:" for name in ("choices", "math_answer", "short_answers"))
RULES = [name for name, target in BUILT_IN.items() if target.startswith(ANSWERS)]


@pytest.mark.parametrize("name", RULES)
def test_every_rule_of_answers_has_a_preset_of_its_name(name: str) -> None:
    assert name in groups()["rewards"]
    rewards = load_config([f"rewards={name}"], is_complete=False).rewards
    assert rewards.components[0].function == name and rewards.components[0].weight == 1


@pytest.mark.parametrize(
    ("name", "references", "metadata", "values"),
    [
        ("exact_match", ("Paris", "City of Paris"), {}, {"paris": 1.0, "It is Paris.": 0.0, "Rome": 0.0}),
        ("multiple_choice", ("C",), {}, {"(C) a cat": 1.0, "the answer is C": 1.0, "A or C": 0.0, "B": 0.0}),
        ("anls", ("receipt",), {}, {"receipt": 1.0, "receipts": 0.875, "bill": 0.0}),
        ("relaxed_accuracy", ("200",), {}, {"209": 1.0, "211": 0.0, "200.0": 1.0}),
        ("true_false", ("True",), {}, {"Yes, it is.": 1.0, "It is not true.": 0.0, "perhaps": 0.0}),
        ("keywords", (), {"keywords": ["red", "circle"]}, {"A red circle.": 1.0, "A red square.": 0.5}),
    ],
)
def test_a_named_reward_scores_as_its_rule_does(
    name: str, references: tuple[str, ...], metadata: dict[str, object], values: dict[str, float]
) -> None:
    rewards = load_config([f"rewards={name}"], is_complete=False).rewards
    isolated = IsolatedProcess(timeout_s=20, start_timeout_s=60)
    scoring = RewardScoring(rewards, None, Tools(isolated, "cpu", "float32"))
    requests = [RewardRequest(Response(text, 3, False), references, metadata, "?") for text in values]
    assert [reward.value for reward in scoring.rewards(requests)] == list(values.values())
    isolated.close()


def reflected(text: str, **options: Any) -> Score:
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
    assert reflected(text) == Score(1.0, reason)


@pytest.mark.parametrize("text", ["awaiting the yeti", "verifying", "", "The answer is 4."])
def test_a_word_inside_another_counts_only_as_published(text: str) -> None:
    assert reflected(text) == Score(0.0, "")
    assert reflected(text, whole_words=False).value == float(any(word in text for word in ("wait", "yet", "verify")))


@pytest.mark.parametrize("words", ["wait", [], ["wait", ""], [3]])
def test_words_that_are_none_are_refused(words: Any) -> None:
    with pytest.raises(ValueError, match="words="):
        reflected("wait", words=words)


def answered(text: str, *, is_truncated: bool = False) -> RewardRequest:
    return RewardRequest(Response(text, 20, is_truncated, ()), (r"\boxed{7}",), {}, "")


@pytest.mark.parametrize(
    ("text", "share"),
    [("", 0.0), ("seven", 0.0), ("\u4e00\u9fff", 1.0), ("\u4dff\ua000", 0.0), ("7 is \u4e03\u5341\u4e2a", 3 / 8)],
)
def test_it_is_the_share_of_characters(text: str, share: float) -> None:
    function = build_function("script_share", {"code_points": [0x4E00, 0x9FFF]}, TOOLS)
    assert evaluate(function, answered(text)).value == pytest.approx(share)


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
        c.name: evaluate(build_function(c.function, c.options, TOOLS), answered(text, is_truncated=is_truncated)).value
        for c in components
        if c.weight != 0
    }
    assert sum(c.weight * values[c.name] for c in components if c.weight != 0) == pytest.approx(reward)


HEAD = "<|im_start|>user\nUse <think>.<|im_end|>\n<|im_start|>assistant\n"


def prompted(prompt: str, text: str) -> RewardRequest:
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
    assert Format(SimpleNamespace(isolated=None), preset="think_answer")(prompted(prompt, text)).value == value


@pytest.mark.parametrize(("preset", "text"), [("json", '{"a": 1}'), ("boxed", r"\boxed{7}")])
def test_other_shapes_are_those_of_the_response_alone(preset: str, text: str) -> None:
    shape = Format(SimpleNamespace(isolated=None), preset=preset)
    assert shape(prompted(f"{HEAD}<think>\n\n</think>\n\n", text)).value == 1.0


def test_an_answer_between_tags_may_be_opened_by_the_prompt() -> None:
    options = {"ignore_case": False, "whole_response": True}
    between = ExactMatch(SimpleNamespace(), extract="tags:answer", **options)
    assert between(prompted(f"{HEAD}<answer>", "7</answer>")).value == 1.0
    assert between(prompted(HEAD, "7</answer>")).value == 0.0
    assert ExactMatch(SimpleNamespace(), extract="whole", **options)(prompted(f"{HEAD}<think>\n", "7")).value == 1.0

"""aeroRL's published rules, against values worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from score_data import answer, record

from mobula.cluster.errors import RewardError
from mobula.configs.load import load_config
from mobula.examples.aerorl.aerorl import aliases
from mobula.rewards.functions import build_function
from mobula.rewards.isolation.process import Tools
from mobula.rewards.offline.rows import read_row

TOOLS = Tools(None, "cpu", "float32")


def score(name: str, row: dict[str, Any], **options: Any) -> float:
    """The value of one of the preset's components for a row."""
    request = read_row(row).request(lambda named: (), needs_images=False)
    return build_function(f"aerorl_{name}", options, TOOLS)(request)


@pytest.mark.parametrize(
    ("response", "reference", "published"),
    [
        ("stop", "Stop ", 1.0),
        (answer("stop"), "stop", 0.5),  # a bare reference is never equal to JSON
        ("the category", "cat", 0.5),
        ("it is a cat.", "cat", 0.5),
        ("it is not red", "red", 0.5),
        ("not blue but red", "red", 0.5),
        (answer("wrong-red"), "red", 0.5),
        (answer("1,000"), "1000", -0.5),
        (answer("14"), "14.0", -0.5),
        ('{"answer": 14}', "14", 0.5),
        ("3.14", "14", 0.5),
        ("3/14", "14", 0.5),
        ("neither red nor blue", "blue", 0.5),
        ("the dog's", "s", 0.5),
        ("page 14", "14", 0.5),
        (answer("the cat"), "cat", 0.5),
        (answer("7%"), "0.07", -0.5),
        ("dog", "cat", -0.5),
        (answer(""), "cat", -0.5),
        ("dog", ["cat", "dog"], 1.0),
        ('{"a": 1, "b": 2}', "1", 0.5),  # an object that names no answer has none
        ('{"result": "cat"}', "cat", 0.5),
        ("```json\n" + answer("cat") + "\n```", "cat", 0.5),
        (r"so it is \boxed{14}", "14.0", -0.5),
        (r"\boxed{the cat}. Or \boxed{", "cat", 0.5),
        (r"red \boxed{}", "red", 0.5),
        ("答案是红色", "红", 0.5),  # no spaces between words
    ],
)
def test_verifier(response: str, reference: Any, published: float) -> None:
    assert score("verifier", record("a", response, reference)) == published


@pytest.mark.parametrize("reference", [None, "", "  ", [], [" ", ""]])
def test_without_a_reference_the_verifier_gives_0(reference: Any) -> None:
    assert score("verifier", record("a", "", reference)) == score("contains", record("a", "", reference)) == 0.0


@pytest.mark.parametrize(
    ("claimed", "evidence", "published"),
    [
        (["cat"], ["cat"], 1.0),
        (["nike"], ["adidas"], -1.0),
        (["14"], ["page 14 of 2020"], 1.0),  # one number inside a text
        (["2014 dogs"], ["2014"], 1.0),
        (["1,000"], ["1000"], -1.0),
        (["12%"], ["0.12"], 1.0),
        (["about the Dog"], ["dog"], 1.0),
        (["The dog."], ["dog"], 1.0),
        (["cat"], ["cat", "dog"], 1.0),  # recall 1/2: F1 2/3
        (["cat", "cat", "Cat", "fox"], ["cat"], 0.5),  # three true claims are one
        (["cat", "fox"], ["cat"], 0.0),
        ([], ["cat"], 0.0),  # claims nothing
        (None, ["cat"], 0.0),  # claims are not given
        (["cat"], [], -1.0),
        ([], [], 0.0),
        (["?!"], ["cat"], -1.0),
        (["?!"], ["..."], 1.0),  # what is left of both is nothing
        (["?"], ["?"], 1.0),
        (["-"], ["="], -1.0),
    ],
)
def test_grounding(claimed: Any, evidence: Any, published: float) -> None:
    assert score("grounding", record("a", "x", "y", evidence, claimed)) == pytest.approx(published)


def test_entities_that_are_no_texts_are_refused() -> None:
    with pytest.raises(RewardError, match="claimed_entities is .* no list of texts"):
        score("grounding", record("a", "x", "y", ["x"], [["x"]]))
    assert score("grounding", record("a", "x", "y", "14", [14, None])) == 1.0


@pytest.mark.parametrize(
    ("response", "published"),
    [
        (answer("x"), 1.0),
        ("answer: x", -0.8),
        ("[1]", 0.5),  # JSON and no object
        ('{"answer":\n"x"}', 0.5),  # '.' meets a newline
        ('{"answer": NaN}', 1.0),  # Python's JSON, not the standard's
        ("{" + "[" * 100_000, -0.8),
        ("", -0.8),
    ],
)
def test_format(response: str, published: float) -> None:
    options = {"require_json": True, "regex_pattern": r"^\{.*\}$"}
    assert score("format", record("a", response, "x"), **options) == published


@pytest.mark.parametrize(
    ("num_words", "metadata", "published"),
    [
        (10, {"latency_ms": 100}, 1.0),
        (11, {"latency_ms": 100}, 0.9),
        (15, {"latency_ms": 150}, 0.0),
        (1, {"latency_ms": 5000}, -1.0),
        (1, {}, 1.0),
        (1, {"generated_tokens": 12}, 1.0),  # what was generated, not what spaces part
    ],
)
def test_cost(num_words: int, metadata: dict[str, Any], published: float) -> None:
    row = record("a", " ".join(["w"] * num_words), "w", **metadata)
    assert score("cost", row, target_tokens=10, latency_budget_ms=100.0) == pytest.approx(published)


def test_a_latency_that_is_no_number_is_refused() -> None:
    with pytest.raises(RewardError, match="latency_ms='soon'"):
        score("cost", record("a", "x", "x", latency_ms="soon"), target_tokens=10, latency_budget_ms=100.0)


@pytest.mark.parametrize(
    ("text", "aliases_of_text"),
    [
        ("Within  the next 2-3 weeks.", {"within the next 2-3 weeks", "next 2-3 weeks"}),
        ("page 14 of 2020", {"page 14 of 2020", "14", "2020"}),
        ("12.50%", {"12.50%", "12.5", "12.5%", "0.125"}),
        ("-5", {"-5"}),
        ("mother-in-law's?", {"mother-in-law's"}),
        ("...", {""}),
        ("=", {"="}),
        ("", set()),
    ],
)
def test_the_published_aliases(text: str, aliases_of_text: set[str]) -> None:
    assert aliases(text) == aliases_of_text


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="regular expression"):
        build_function("aerorl_format", {"require_json": False, "regex_pattern": "("}, TOOLS)


def test_the_preset_has_the_published_weights_and_its_baseline_counts_nothing() -> None:
    rewards = load_config(["rewards=aerorl"], is_complete=False).rewards
    weights = {component.name: component.weight for component in rewards.components}
    assert weights == {"verifier": 0.4, "grounding": 0.3, "format": 0.2, "cost": 0.1, "contains": 0.0}

"""The rules of offline scoring, in aeroRL's published reading and in ours, against values worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from score_data import answer, options, record

from mobula.rewards.offline.options import COMPONENTS, ScoreOptions, parse_weights
from mobula.rewards.offline.rules.aerorl_rules import AeroRLRules
from mobula.rewards.offline.rules.answers import Answer, read_answer
from mobula.rewards.offline.rules.entities import aerorl_aliases, entity_keys
from mobula.rewards.offline.rules.mobula_rules import NO_REFERENCE, MobulaRules, stands_in
from mobula.rewards.offline.rules.schemes import built_in_schemes
from mobula.rewards.offline.sources.records import from_values


def scores(row: dict[str, Any], chosen: ScoreOptions | None = None) -> tuple[dict[str, float], dict[str, float] | str]:
    """The results of aeroRL's reading and of ours for a row."""
    found = from_values(row)
    one, other = (
        rules(chosen or options()).score(found, found.references, read_answer(found.response))
        for rules in (AeroRLRules, MobulaRules)
    )
    ours = other if isinstance(other, str) else dict(zip(COMPONENTS, other, strict=True))
    return dict(zip(COMPONENTS, one, strict=True)), ours


@pytest.mark.parametrize(
    ("response", "reference", "published", "ours"),
    [
        ("stop", "Stop ", 1.0, 1.0),
        (answer("stop"), "stop", 0.5, 1.0),  # a bare reference is never equal to JSON
        ("the category", "cat", 0.5, -0.5),
        ("it is a cat.", "cat", 0.5, 0.5),
        ("it is not red", "red", 0.5, -0.5),
        ("not blue but red", "red", 0.5, 0.5),
        (answer("wrong-red"), "red", 0.5, -0.5),
        (answer("1,000"), "1000", -0.5, 1.0),
        (answer("14"), "14.0", -0.5, 1.0),
        ('{"answer": 14}', "14", 0.5, 1.0),
        ("3.14", "14", 0.5, -0.5),
        ("3/14", "14", 0.5, -0.5),
        ("neither red nor blue", "blue", 0.5, -0.5),
        ("the dog's", "s", 0.5, -0.5),
        ("page 14", "14", 0.5, 0.5),
        (answer("the cat"), "cat", 0.5, 1.0),
        (answer("7%"), "0.07", -0.5, 1.0),
        ("dog", "cat", -0.5, -0.5),
        (answer(""), "cat", -0.5, -0.5),
        ("dog", ["cat", "dog"], 1.0, 1.0),
        ('{"a": 1, "b": 2}', "1", 0.5, -0.5),  # an object that names no answer has none
        ('{"result": "cat"}', "cat", 0.5, 1.0),
        ("```json\n" + answer("cat") + "\n```", "cat", 0.5, 1.0),
        (r"so it is \boxed{14}", "14.0", -0.5, 1.0),
        (r"\boxed{the cat}. Or \boxed{", "cat", 0.5, 1.0),
        (r"red \boxed{}", "red", 0.5, -0.5),
        ("答案是红色", "红", 0.5, 0.5),  # no spaces between words
    ],
)
def test_verifier(response: str, reference: Any, published: float, ours: float) -> None:
    theirs, mine = scores(record("a", response, reference))
    assert theirs["verifier"] == published
    assert mine["verifier"] == ours


@pytest.mark.parametrize("reference", [None, "", "  ", [], [" ", ""]])
def test_without_a_reference_aerorl_gives_0_and_we_no_score(reference: Any) -> None:
    theirs, mine = scores(record("a", "", reference))
    assert theirs["verifier"] == 0.0
    assert mine == NO_REFERENCE


@pytest.mark.parametrize(
    ("claimed", "evidence", "published", "ours"),
    [
        (["cat"], ["cat"], 1.0, 1.0),
        (["nike"], ["adidas"], -1.0, -1.0),
        (["14"], ["page 14 of 2020"], 1.0, -1.0),  # one number inside a text
        (["2014 dogs"], ["2014"], 1.0, -1.0),
        (["1,000"], ["1000"], -1.0, 1.0),
        (["12%"], ["0.12"], 1.0, 1.0),
        (["about the Dog"], ["dog"], 1.0, -1.0),
        (["The dog."], ["dog"], 1.0, 1.0),
        (["cat"], ["cat", "dog"], 1.0, 1 / 3),  # recall 1/2: F1 2/3
        (["cat", "cat", "Cat", "fox"], ["cat"], 0.5, 1 / 3),  # three true claims are one
        (["cat", "fox"], ["cat"], 0.0, 1 / 3),
        ([], ["cat"], 0.0, -1.0),  # claims nothing
        (None, ["cat"], 0.0, 0.0),  # claims are not given
        (["cat"], [], -1.0, -1.0),
        ([], [], 0.0, 0.0),
        (["?!"], ["cat"], -1.0, -1.0),
        (["?!"], ["..."], 1.0, -1.0),  # what is left of both is nothing
        (["?"], ["?"], 1.0, 1.0),
        (["-"], ["="], -1.0, -1.0),
    ],
)
def test_grounding(claimed: Any, evidence: Any, published: float, ours: float) -> None:
    theirs, mine = scores(record("a", "x", "y", evidence, claimed))
    assert theirs["grounding"] == pytest.approx(published)
    assert mine["grounding"] == pytest.approx(ours)


def test_evidence_that_lists_other_words_for_the_reference_is_one_entity() -> None:
    _, mine = scores(record("a", "x", ["5", "five"], ["5.", "five"], ["five"]))
    assert mine["grounding"] == 1.0


@pytest.mark.parametrize(
    ("response", "published", "ours"),
    [
        (answer("x"), 1.0, 1.0),
        ("answer: x", -0.8, -0.8),
        ("[1]", 0.5, -0.8),  # JSON and no object
        ('{"answer":\n"x"}', 0.5, 1.0),  # '.' meets a newline
        ('{"answer": NaN}', 1.0, pytest.approx(-0.3)),  # Python's JSON, not the standard's
        ("{" + "[" * 100_000, -0.8, -0.8),
        ("", -0.8, -0.8),
    ],
)
def test_format(response: str, published: float, ours: float) -> None:
    chosen = options(require_json=True, regex_pattern=r"^\{.*\}$")
    theirs, mine = scores(record("a", response, "x"), chosen)
    assert theirs["format"] == published
    assert mine["format"] == ours


@pytest.mark.parametrize(
    ("num_words", "metadata", "published", "ours"),
    [
        (10, {"latency_ms": 100}, 1.0, 1.0),
        (11, {"latency_ms": 100}, 0.9, 0.9),
        (15, {"latency_ms": 150}, 0.0, 0.0),
        (1, {"latency_ms": 5000}, -1.0, -1.0),
        (1, {}, 1.0, 1.0),
        (1, {"generated_tokens": 12}, 1.0, 0.8),  # what was generated, not what spaces part
    ],
)
def test_cost(num_words: int, metadata: dict[str, Any], published: float, ours: float) -> None:
    chosen = options(target_tokens=10, latency_budget_ms=100.0)
    theirs, mine = scores(record("a", " ".join(["w"] * num_words), "w", **metadata), chosen)
    assert theirs["cost"] == pytest.approx(published)
    assert mine["cost"] == pytest.approx(ours)


@pytest.mark.parametrize(
    ("text", "aliases"),
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
def test_the_published_aliases(text: str, aliases: set[str]) -> None:
    assert aerorl_aliases(text) == aliases


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("$1,000.50", "1000.5", True),
        ("1,00", "100", False),
        ("1e3", "1000", False),
        ("+5", "5", True),
        ("-5", "5", False),
        ("(red)", "Red", True),
        ("a cat", "cat", True),
        ("a", "a", True),
        ("14%", "14", True),
        ("9" * 5000, "9" * 5000, True),
    ],
)
def test_when_two_spellings_are_one_entity(one: str, other: str, is_same: bool) -> None:
    assert (not entity_keys(one).isdisjoint(entity_keys(other))) is is_same


@pytest.mark.parametrize("response", ["\ud800", '"\\ud800"', "9" * 5000, "[" * 100_000, '{"answer": 1e999}', "```"])
def test_no_response_breaks_the_reading_of_answers(response: str) -> None:
    assert isinstance(read_answer(response), Answer)


def test_a_reference_that_is_everywhere_and_nowhere_a_word_is_found_out_soon() -> None:
    assert not stands_in("a", "a" * 3_000_000)


def test_the_total_is_rounded_to_six_digits_and_a_threshold_is_reached_by_being_equal() -> None:
    scheme, _ = built_in_schemes(options(weights={"verifier": 1 / 3, "grounding": 0, "format": 0, "cost": 0}))
    assert scheme.total((1.0, 1.0, 1.0, 1.0)) == 0.333333
    assert built_in_schemes(options(pass_threshold=0.775))[0].passes((1.0, 1.0, 0.375, 0.0))


@pytest.mark.parametrize(
    ("word", "what"), [("fluency=1", "fluency"), ("cost=much", "much"), ("cost", "no number"), ("cost=nan", "finite")]
)
def test_an_unfit_weight_is_refused_by_name(word: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        parse_weights([word])


def test_given_weights_stand_beside_the_other_defaults() -> None:
    assert parse_weights(["cost=0.05", "verifier=.45"]) == {
        "verifier": 0.45,
        "grounding": 0.3,
        "format": 0.2,
        "cost": 0.05,
    }


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="regular expression"):
        options(regex_pattern="(")

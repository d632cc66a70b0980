"""Rewards of written tasks and rewards of a few lines, against published values and independent computations."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
from data_rows import encoded
from PIL import Image
from reward_data import TOOLS, request, score

from mobula.cluster.errors import RewardError
from mobula.cluster.records.trajectory import EpisodeTurn, Response
from mobula.configs.load import load_config
from mobula.configs.overrides import groups
from mobula.examples.digits.digit_list import digit_list
from mobula.examples.geospot.distances import Position, centre, haversine_km
from mobula.examples.geospot.gazetteer import Gazetteer, installed_gazetteer, installed_places
from mobula.examples.geospot.geospot_reward import Geospot
from mobula.examples.geospot.place_answers import PlaceAnswer, read_place
from mobula.examples.geospot.stages import STAGES
from mobula.rewards.components import Component, RewardScoring
from mobula.rewards.contract import RewardRequest, Score, ScoringFailure, evaluate
from mobula.rewards.functions import BUILT_IN, build_function
from mobula.rewards.functions.plugin import EnvironmentReward
from mobula.rewards.functions.short_answers import read_truth

NEGATIONS = (
    "’s not", "isn’t", "can’t be", "is hardly", "is by no means", "is not at all", "cannot be said to be",
    "doesn't seem", "is far from",
)  # fmt: skip


TRUTHS: dict[bool | None, tuple[str, ...]] = {
    True: (
        "True", "Yes, that is true.", "It is not false", "I never said that it is not true", "Is it true? Yes.",
        "Not only is it true, it is obvious.", "Wait, it is true.",
    ),
    False: (
        "false.", "No.", "It is not true.", *(f"It {words} true." for words in NEGATIONS),
        "The statement isn't really true", "I do not think that it is true.", "I don’t think so, it is false.",
        "I doubt that it is true",
        "There is no circle, so the statement is false.",
    ),
    None: (
        "unknown", "untrue", "true or false", "neither true nor false", "It is not, in my view, true", "Is it true?",
        "True?", "True. Wait, actually not.", "True. Wait, actually false.", "no circle is red", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "truth"), [(text, truth) for truth, texts in TRUTHS.items() for text in texts])
def test_truth_is_read_from_whole_words(text: str, truth: bool | None) -> None:
    assert read_truth(text) is truth


def test_true_false_pays_the_right_answer_and_follows_vlm_gym_on_request() -> None:
    ours, theirs = ({"extract": "whole", "compat": compat} for compat in ("none", "vlm_gym"))
    assert score("true_false", ours, request("It is not true", "False")).value == 1.0
    assert score("true_false", theirs, request("It is not true", "False")).value == 0.0  # "true" is in it
    assert score("true_false", theirs, request("unknown", "False")).value == 1.0  # as is "no"
    assert score("true_false", theirs, request("both images", "False")).value == 1.0  # the default
    assert score("true_false", ours, request("both images", "False")).value == 0.0
    with pytest.raises(RewardError, match="True and False"):
        score("true_false", ours, request("True", "7"))


def test_keywords_are_whole_words_and_a_list_of_everything_pays_little() -> None:
    ours, theirs = {"max_words": 8, "compat": "none"}, {"max_words": 0, "compat": "vlm_gym"}
    words = ["red", "two", "tea cup"]
    assert score("keywords", ours, request("Two Red shapes, a tea  cup", keywords=words)).value == 1.0
    assert score("keywords", ours, request("A bored network", keywords=words)).value == 0.0
    assert score("keywords", theirs, request("A bored network", keywords=words)).value == pytest.approx(2 / 3)
    everything = score("keywords", ours, request("red green blue one two three tea cup " * 2, keywords=words))
    assert everything.value == pytest.approx(8 / 16)
    with pytest.raises(RewardError, match="keywords"):
        score("keywords", ours, request("red"))
    with pytest.raises(RewardError, match="list of words"):
        score("keywords", ours, request("red", keywords="red"))


class FixedPlaces:
    """A geocoder of the places of the Paris and Munich fixture.

    The positions of the countries and regions are those for which vlm-gym's five published rewards come out.
    """

    COUNTRIES = {"france": (46.3, 1.5), "fr": (46.3, 1.5), "germany": (50.5, 10.4)}
    REGIONS = {"île-de-france": (48.7, 2.2), "bavaria": (48.9, 11.1)}
    CITIES = {"paris": (48.8566, 2.3522), "munich": (48.137, 11.575)}

    def country(self, country: str) -> Position | None:
        return self.COUNTRIES.get(country.lower())

    def region(self, region: str, country: str) -> Position | None:
        return self.REGIONS.get(region.lower())

    def city(self, city: str, region: str, country: str) -> Position | None:
        return self.CITIES.get(city.lower())


PARIS = {"city": "Paris", "region": "Île-de-France", "country": "FR", "latitude": 48.8566, "longitude": 2.3522}

MUNICH = "City: Munich\nRegion: Bavaria\nCountry: Germany\nLatitude: 48.137\nLongitude: 11.575"


def geospot(text: str, stage: str, compat: str, *, format_weight: float = 0.0) -> float:
    function = Geospot(FixedPlaces(), stage=stage, format_weight=format_weight, compat=compat)
    return function(request(text, **PARIS)).value


def test_geospot_equals_vlm_gym_to_the_digit() -> None:
    published = (0.668569, 0.668569, 0.343530, 0.195900, 0.140494)
    assert [round(geospot(MUNICH, stage, "vlm_gym"), 6) for stage in STAGES] == list(published)
    assert [geospot("Country: France", stage, "vlm_gym") for stage in STAGES] == [1.0] * 5


def test_leaving_fields_out_never_pays() -> None:
    lines = MUNICH.splitlines()
    for stage in STAGES:
        whole = geospot(MUNICH, stage, "none")
        for left_out in range(len(lines)):
            rest = "\n".join(line for number, line in enumerate(lines) if number != left_out)
            assert geospot(rest, stage, "none") <= whole
    assert geospot("Country: France", "full", "none") == pytest.approx(0.15 / 1.2)
    right = "City: Paris\nRegion: Île-de-France\nCountry: France\nLatitude: 48.8566\nLongitude: 2.3522"
    assert [geospot(right, stage, "none", format_weight=0.1) for stage in STAGES] == pytest.approx([1.0] * 5)
    assert geospot("no idea", "full", "none", format_weight=0.1) == 0.0


def test_kernels_become_tighter_from_stage_to_stage() -> None:
    near = "Country: Germany"
    coarse, plain = (geospot(near, stage, "none") for stage in ("country_coarse", "country"))
    assert coarse > plain
    assert coarse == pytest.approx(math.exp(-haversine_km((46.3, 1.5), (50.5, 10.4)) / 8000))


def test_the_stage_comes_from_the_row() -> None:
    function = Geospot(FixedPlaces(), stage="row", format_weight=0.0, compat="none")
    assert function(request("Country: France", **PARIS, stage="country")).value == 1.0
    assert function(request("Country: France", **PARIS)).value == pytest.approx(0.125)  # full
    for wrong in ({"stage": "last"}, {"latitude": "x"}, {"latitude": 91}, {"latitude": None}):
        with pytest.raises(RewardError):
            function(request("Country: France", **{**PARIS, **wrong}))


@pytest.mark.parametrize(
    ("text", "splits", "expected"),
    [
        ("- City: Paris\n* Lat: 48,85\n**Country**: France", False, PlaceAnswer("Paris", "", "France", 48.85)),
        ("State: Texas\nProvince: Other", False, PlaceAnswer(region="Texas")),  # the first one counts
        ("Latitude: 91\nLongitude: 181", False, PlaceAnswer()),
        ("City: A, B, C", False, PlaceAnswer(city="A, B, C")),
        ("City: A, B, C", True, PlaceAnswer("A, B, C", "B", "C")),  # vlm-gym's reading
        ("Paris, IDF, France, 48.9, 2.4", True, PlaceAnswer("Paris", "IDF", "France", 48.9, 2.4)),
        ("Paris, IDF, France, 48.9, 2.4", False, PlaceAnswer()),
        ("Paris | IDF | France", True, PlaceAnswer("Paris", "IDF", "France")),
        ("Paris, France", True, PlaceAnswer()),
    ],
)
def test_answers_about_places_are_read(text: str, splits: bool, expected: PlaceAnswer) -> None:
    assert read_place(text, splits_lines=splits) == expected


def test_distances_are_those_of_a_sphere() -> None:
    assert haversine_km((0, 0), (0, 180)) == pytest.approx(math.pi * 6371)
    assert haversine_km((90, 10), (-90, 70)) == pytest.approx(math.pi * 6371)
    assert haversine_km((48.8566, 2.3522), (48.8566, 2.3522)) == 0
    assert centre([(0, 170), (0, -170)]) == pytest.approx((0, 180))


def test_ambiguous_names_have_no_position() -> None:
    codes = {"us": "US", "france": "FR", "fr": "FR"}
    places = [
        ("Paris", "Ile-de-France", "FR", 48.86, 2.35),
        ("Paris", "Texas", "US", 33.66, -95.56),
        ("Springfield", "Ohio", "US", 39.9, -83.8),
        ("Springfield", "Texas", "US", 31.6, -96.5),
    ]
    found = Gazetteer(places, codes)
    assert found.city("Paris", "", "") is None
    assert found.city("paris", "", "France") == (48.86, 2.35)
    assert found.city("Paris", "texas", "") == (33.66, -95.56)
    assert found.city("Springfield", "", "US") is None
    assert found.city("Springfield", "Ohio", "US") == (39.9, -83.8)
    assert found.city("Paris", "", "Atlantis") is None
    assert found.country("") is None and found.region("", "") is None


def test_the_installed_gazetteer_knows_the_world() -> None:
    pytest.importorskip("pycountry")
    assert len(installed_places()) > 100_000
    found = installed_gazetteer()
    paris = found.city("Paris", "", "France")
    assert paris is not None and haversine_km(paris, (48.8566, 2.3522)) < 10
    munich = found.city("Munich", "Bavaria", "Germany")
    assert munich is not None and haversine_km(munich, (48.137, 11.575)) < 10
    short = ("USA", "us", "UK", "Russia", "Bolivia")
    for name in (*short, "United States", "Côte d'Ivoire", "Bolivia, Plurinational State of"):
        assert found.country(name) is not None, name
    assert found.region("Île de France", "FR") is not None


A, B, C = "Picture A is the digit 7.", "Picture B is the digit 3.", "Picture C is the digit 0."

SUM = "The sum is 10."

RIGHT = "\n".join([A, B, C, SUM])

WRONG_A, WRONG_B, WRONG_C = A.replace("7", "8"), B.replace("3", "4"), C.replace("0", "1")


def listed(*sentences: str, separator: str = "\n", references: tuple[str, ...] = ("10", RIGHT)) -> Score:
    return evaluate(digit_list, request(separator.join(sentences), *references))


@pytest.mark.parametrize("separator", ["\n", " ", "\n\n", " \n "])
def test_the_whole_truth_scores_1(separator: str) -> None:
    assert listed(A, B, C, SUM, separator=separator) == Score(1.0, "", {"digits": 1.0, "sum": 1.0, "extra": 0.0})


@pytest.mark.parametrize(
    ("sentences", "num_right"),
    [
        ((A, B, WRONG_C, SUM), 3),
        *[((A, B, C, last), 3) for last in ("The sum is 11.", "The sum is 010.")],
        *[((A, B, C, last), 2) for last in ("The sum is -10.", "So: " + SUM)],
        ((WRONG_A, WRONG_B, C, "The sum is 12."), 1),
        # cut off
        ((A, B), 2),
        ((A, "Picture B is the dig"), 0),  # a piece of a sentence states nothing: another sentence
        ((A, B, C, "The sum is 1"), 2),
        *[((blank,), 0) for blank in ("", " \n")],
        # a sentence is missing: what follows is not in its place
        *[((A, C, SUM), 2), ((B, C, SUM), 1), ((A, B, C), 3), ((SUM,), 1)],
        # another order
        *[((B, A, C, SUM), 2), ((SUM, A, B, C), 0), ((A, SUM, B, C), 1)],
        # the same image twice
        *[((A, A, B, C, SUM), 1), ((A, B, B, SUM), 3), ((A, A.replace("7", "3"), C, SUM), 3)],
        # more words never earn more
        ((A, B, C, SUM, SUM), 2),  # no sum, as there are two, and one sentence too many
        ((A, B, C, "The sum is 11.", SUM), 2),
        ((A, B, C, *(f"The sum is {n}." for n in range(20))), 0),
        ((A, B, C, "Picture D is the digit 0.", SUM), 3),
        *[((A, B, C, SUM, more), 2) for more in ("Picture D is the digit 0.", "I am sure.")],
        ((*(A.replace("7", str(n)) for n in range(10)), SUM), 0),
        *[(("Well.", A, B, C, SUM), 0), ((A + B, C, SUM), 0), ((A, B, C, SUM) * 200, 0), (("." * 10_000,), 0)],
        # the first sentence in other words
        *[((first, B, C, SUM), 2) for first in (f"{A[:-1]} or 8.", A[:-1], A.lower())],
        *[((A.replace("7", seven), B, C, SUM), 2) for seven in ("07", "٧")],
    ],
)
def test_each_statement_in_its_place_has_a_fourth_of_the_credit(sentences: tuple[str, ...], num_right: int) -> None:
    assert listed(*sentences).value == num_right / 4


def test_no_answer_of_up_to_five_sentences_beats_the_truth() -> None:
    sentences_used = (A, B, C, SUM, WRONG_A, "The sum is 11.", "Hm.")
    answers = (answer for length in range(6) for answer in product(sentences_used, repeat=length))
    assert [answer for answer in answers if listed(*answer).value > 3 / 4] == [(A, B, C, SUM)]


def test_the_reason_and_the_parts_name_what_is_wrong() -> None:
    found = listed(A, WRONG_B, C, SUM, "Hm.")
    assert found.reason == "1 of 3 digits wrong or out of place, sum wrong or not last, 1 further sentences"
    assert found.breakdown == {"digits": 2 / 3, "sum": 0.0, "extra": 1.0}


@pytest.mark.parametrize("references", [("10",), ("10", A), ("10", SUM), (f"{A}\nHm.\n{SUM}",), ("",)])
def test_a_prompt_without_such_a_reference_is_refused(references: tuple[str, ...]) -> None:
    with pytest.raises(RewardError, match="no reference"):
        listed(A, references=references)


def episode(*rewards: dict[str, float], failure: str = "") -> RewardRequest:
    turns = tuple(EpisodeTurn(n, n + 1, "go", "", parts, "none") for n, parts in enumerate(rewards))
    return RewardRequest(Response("go", 1, False, turns=turns, failure=failure), (), {}, "")


def test_turns_are_discounted_and_parts_are_shown() -> None:
    score = EnvironmentReward(None, discount=0.5)(episode({"a": 1.0}, {"a": 2.0, "b": 3.0}, {"b": 4.0}))
    assert score.value == 1.0 + 0.5 * 5.0 + 0.25 * 4.0
    assert score.breakdown == {"a": 2.0, "b": 2.5}


def test_a_failed_episode_and_a_response_of_one_turn_are_not_worth_zero() -> None:
    component = Component("game", EnvironmentReward(None, discount=1.0), retries=0, cache_entries=0)
    failed, single = component.evaluate([episode({"a": 1.0}, failure="timed_out: 3 s"), episode()])
    assert isinstance(failed, ScoringFailure) and failed.reason == "the episode failed: timed_out: 3 s"
    assert isinstance(single, ScoringFailure) and "no episode" in single.reason


FLAT = Image.new("RGB", (64, 64), (40, 90, 160))

NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))


def of_images(*images: Image.Image) -> RewardRequest:
    return RewardRequest(Response("", 1, False, tuple(map(encoded, images))), (), {}, "")


def kilobytes(image: Image.Image, quality: int) -> float:
    return len(encoded(image, "JPEG", quality=quality)) / 1000


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


RULES = [name for name, target in BUILT_IN.items() if ".math_answer:" in target or ".short_answers:" in target]


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
    scoring = RewardScoring(rewards, None, TOOLS)
    requests = [request(text, *references, **metadata) for text in values]
    assert [reward.value for reward in scoring.rewards(requests)] == list(values.values())


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
    assert score("reflection", {}, request(text)) == Score(1.0, reason)


@pytest.mark.parametrize("text", ["awaiting the yeti", "verifying", "", "The answer is 4."])
def test_a_word_inside_another_counts_only_as_published(text: str) -> None:
    assert score("reflection", {}, request(text)) == Score(0.0, "")
    published = score("reflection", {"whole_words": False}, request(text)).value
    assert published == float(any(word in text for word in ("wait", "yet", "verify")))


@pytest.mark.parametrize("words", ["wait", [], ["wait", ""], [3]])
def test_words_that_are_none_are_refused(words: Any) -> None:
    with pytest.raises(ValueError, match="words="):
        score("reflection", {"words": words}, request("wait"))


@pytest.mark.parametrize(
    ("text", "share"),
    [("", 0.0), ("seven", 0.0), ("\u4e00\u9fff", 1.0), ("\u4dff\ua000", 0.0), ("7 is \u4e03\u5341\u4e2a", 3 / 8)],
)
def test_it_is_the_share_of_characters(text: str, share: float) -> None:
    assert score("script_share", {"code_points": [0x4E00, 0x9FFF]}, request(text)).value == pytest.approx(share)


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
    asked = RewardRequest(Response(text, 20, is_truncated), (r"\boxed{7}",), {}, "")
    found = [c.weight * score(c.function, c.options, asked).value for c in components if c.weight != 0]
    assert sum(found) == pytest.approx(reward)


HEAD = "<|im_start|>user\nUse <think>.<|im_end|>\n<|im_start|>assistant\n"


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
    assert score("format", {"preset": "think_answer"}, request(text, prompt=prompt)).value == value


@pytest.mark.parametrize(("preset", "text"), [("json", '{"a": 1}'), ("boxed", r"\boxed{7}")])
def test_other_shapes_are_those_of_the_response_alone(preset: str, text: str) -> None:
    asked = request(text, prompt=f"{HEAD}<think>\n\n</think>\n\n")
    assert score("format", {"preset": preset}, asked).value == 1.0


def test_an_answer_between_tags_may_be_opened_by_the_prompt() -> None:
    options = {"ignore_case": False, "whole_response": True}
    for extract, prompt, text, value in (
        ("tags:answer", f"{HEAD}<answer>", "7</answer>", 1.0),
        ("tags:answer", HEAD, "7</answer>", 0.0),
        ("whole", f"{HEAD}<think>\n", "7", 1.0),
    ):
        found = score("exact_match", {**options, "extract": extract}, request(text, "7", prompt=prompt))
        assert found.value == value

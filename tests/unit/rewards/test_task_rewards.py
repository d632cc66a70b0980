"""Rewards of the built-in tasks: true or false, keywords, and how near an answer about a place is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from mobula.cluster.errors import RewardError
from mobula.cluster.records.trajectory import Response
from mobula.examples.geospot.distances import Position, centre, haversine_km
from mobula.examples.geospot.gazetteer import Gazetteer, installed_gazetteer, installed_places
from mobula.examples.geospot.geospot_reward import Geospot
from mobula.examples.geospot.place_answers import PlaceAnswer, read_place
from mobula.examples.geospot.stages import STAGES
from mobula.rewards.contract import RewardRequest, Score, evaluate
from mobula.rewards.functions import build_function
from mobula.rewards.functions.answers.true_false import read_truth
from mobula.rewards.isolation.process import IsolatedProcess
from mobula.rewards.tools import Tools

TOOLS = Tools(IsolatedProcess(timeout_s=1, start_timeout_s=1), "cpu", "float32")


def request(text: str, *references: str, **metadata: Any) -> RewardRequest:
    return RewardRequest(Response(text, len(text.split()), False), references, metadata, "the prompt")


def score(name: str, options: Mapping[str, Any], given: RewardRequest) -> Score:
    return evaluate(build_function(name, options, TOOLS), given)


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("True", True),
        ("false.", False),
        ("Yes, that is true.", True),
        ("No.", False),
        ("It is not true.", False),
        ("The statement isn't really true", False),
        ("It is not false", True),
        ("unknown", None),  # vlm-gym finds "no" in it
        ("untrue", None),
        ("true or false", None),
        ("neither true nor false", None),
        ("no circle is red", None),
        ("There is no circle, so the statement is false.", False),
        ("", None),
    ],
)
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
    for name in (
        "United States",
        "USA",
        "us",
        "Côte d'Ivoire",
        "Bolivia",
        "Bolivia, Plurinational State of",
        "Russia",
        "UK",
    ):
        assert found.country(name) is not None, name
    assert found.region("Île de France", "FR") is not None

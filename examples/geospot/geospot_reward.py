"""Geospot: distance of an answer from a place, by country, region, city and coordinates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from mobula.cluster.errors import RewardError
from mobula.examples.geospot.distances import Position, fixed_mean, haversine_km, kernels, mean_of_given
from mobula.examples.geospot.gazetteer import Gazetteer
from mobula.examples.geospot.place_answers import (
    MAX_LATITUDE,
    MAX_LONGITUDE,
    NAMES,
    PlaceAnswer,
    read_place,
)
from mobula.examples.geospot.stages import FULL, STAGES, TAUS_KM
from mobula.rewards.contract import RewardRequest, Score
from mobula.rewards.functions.parsing.extraction import check_number, given_metadata

FROM_ROW = "row"
TOLERANCE_KM = 25.0


class Geospot:
    """sum_f w_f exp(-d_f / tau_f) / sum_f w_f over country, region, city and coordinates.

    d_f is the great-circle distance between the true and the answered position; an offline gazetteer locates names. A
    field that is missing, out of range, unknown or ambiguous counts 0, so omitting fields never pays. `stage` selects
    weights and kernel width (`stages.py`); `row` takes the stage of the row's metadata,
    `full` by default. `format_weight` is the share of the value for an answer of two or more fields.

    The metadata has `city`, `region`, `country`, `latitude` and `longitude`; a name may be missing.

    `compat=vlm_gym` is vlm-gym's reward: kernels of constant width, the mean over the answered fields, vlm-gym's parser
    with split lines, no share for the format; names are located by our gazetteer.

    Raises:
        RewardError: the metadata has no position, or an unknown stage.
    """

    def __init__(
        self,
        geocoder: Gazetteer,
        *,
        stage: str,
        format_weight: float,
        compat: Literal["none", "vlm_gym"],
    ) -> None:
        if stage not in (*STAGES, FROM_ROW):
            raise ValueError(f"stage={stage!r} is unknown: use {', '.join(STAGES)}, or {FROM_ROW}")
        if compat not in ("none", "vlm_gym"):
            raise ValueError(f"compat={compat!r} is unknown: use none or vlm_gym")
        check_number("format_weight", format_weight, low=0, high=1)
        self._stage = stage
        self._format_weight = format_weight
        self._is_compatible = compat == "vlm_gym"
        self._geocoder = geocoder

    def __call__(self, request: RewardRequest) -> Score:
        name = request.metadata.get("stage", FULL) if self._stage == FROM_ROW else self._stage
        if name not in STAGES:
            raise RewardError(f"metadata.stage={name!r} is no stage: use {', '.join(STAGES)}")
        stage = STAGES[name]
        truth = _truth(request.metadata)
        answer = read_place(request.response.text, splits_lines=self._is_compatible)
        distances = self._distances(truth, answer)
        used = {field: distance for field, distance in distances.items() if field in stage.weights}
        if self._is_compatible:
            value = mean_of_given(kernels(used, TAUS_KM), stage.weights)
        else:
            taus = {field: tau * stage.width for field, tau in TAUS_KM.items()}
            nearness = fixed_mean(kernels(used, taus), stage.weights)
            value = (1 - self._format_weight) * nearness + self._format_weight * answer.is_well_formed
        missing = [field for field in stage.weights if field not in distances]
        return Score(value, f"no position for {', '.join(missing)}" if missing else "", _parts(distances, answer))

    def _distances(self, truth: PlaceAnswer, answer: PlaceAnswer) -> dict[str, float]:
        ours, theirs = self._positions(truth), self._positions(answer)
        assert truth.position is not None
        ours.setdefault("city", truth.position)
        return {field: haversine_km(ours[field], theirs[field]) for field in theirs if field in ours}

    def _positions(self, place: PlaceAnswer) -> dict[str, Position]:
        positions = {
            "country": self._geocoder.country(place.country),
            "region": self._geocoder.region(place.region, place.country),
            "city": self._geocoder.city(place.city, place.region, place.country),
            "coords": place.position,
        }
        return {field: position for field, position in positions.items() if position is not None}


def _truth(metadata: Mapping[str, Any]) -> PlaceAnswer:
    """Reads the true place out of the metadata. Raises `RewardError` without a position."""
    latitude, longitude = given_metadata(metadata, "latitude"), given_metadata(metadata, "longitude")
    try:
        position = float(latitude), float(longitude)
    except (TypeError, ValueError) as error:
        raise RewardError(f"metadata has latitude={latitude!r}, longitude={longitude!r}: give numbers") from error
    if not (abs(position[0]) <= MAX_LATITUDE and abs(position[1]) <= MAX_LONGITUDE):  # NaN as well
        raise RewardError(f"metadata has latitude={latitude!r}, longitude={longitude!r}: that is no place on Earth")
    city, region, country = (str(metadata.get(name) or "") for name in NAMES)
    return PlaceAnswer(city, region, country, *position)


def _parts(distances: Mapping[str, float], answer: PlaceAnswer) -> dict[str, float]:
    within = distances.get("coords", float("inf")) <= TOLERANCE_KM
    shown = {f"km_{field}": distance for field, distance in distances.items()}
    return {**shown, "is_well_formed": float(answer.is_well_formed), "is_within_25_km": float(within)}

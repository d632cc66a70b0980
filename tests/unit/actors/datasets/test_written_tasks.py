"""The data of nlvr2, captioning and geospot: true to their images, balanced, the same for the same seed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mobula.examples.geospot.gazetteer import GazetteerCity
from mobula.examples.geospot.geospot import MARK, draw_map, draw_world, write_places
from mobula.examples.shapes.captioning import describe, keywords_of, write_captioning
from mobula.examples.shapes.nlvr2 import write_nlvr2
from mobula.examples.shapes.shapes import BACKGROUND, COLORS, Shape

STAGES = {"country": 0, "city": 100, "full": 1000}


def read(folder: Path, split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]


def colors_in(path: Path) -> Counter[str]:
    """Squares of the image by the color of their middle."""
    pixels = np.asarray(Image.open(path).convert("RGB"))
    names = {rgb: name for name, rgb in COLORS.items()} | {BACKGROUND: "none"}
    return Counter(names[tuple(int(v) for v in pixels[y, x])] for y in (14, 42) for x in (14, 42))


@pytest.fixture(scope="module")
def nlvr2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_nlvr2(tmp_path_factory.mktemp("nlvr2") / "data")


def test_half_of_the_statements_are_true(nlvr2: Path) -> None:
    for split in ("train", "validation", "test"):
        rows = read(nlvr2, split)
        assert Counter(row["answer"] for row in rows) == {"True": len(rows) / 2, "False": len(rows) / 2}
        assert len({row["id"] for row in rows}) == len(rows)


def test_statements_hold_of_their_images(nlvr2: Path) -> None:
    """Those on colors and numbers, read back from the pixels."""
    num_checked = 0
    for row in read(nlvr2, "test"):
        statement = row["question"].removeprefix("<image><image>Look at the two images. ")
        left, right = (colors_in(nlvr2 / name) for name in row["image"])
        if statement.startswith("The left image has more shapes"):
            assert str(4 - left["none"] > 4 - right["none"]) == row["answer"]
            num_checked += 1
        elif statement.startswith("The") and "contains a" in statement:
            color = statement.split("contains a ")[1].split()[0]
            assert str((left if " left " in statement else right)[color] > 0) == row["answer"]
            num_checked += 1
    assert num_checked == 100


def test_captions_name_what_the_image_shows(tmp_path: Path) -> None:
    folder = write_captioning(tmp_path / "data")
    for row in read(folder, "test"):
        shown = {color for color in colors_in(folder / row["image"]) if color != "none"}
        assert shown == set(row["metadata"]["keywords"]) & set(COLORS)
        assert all(keyword in row["answer"].lower() for keyword in row["metadata"]["keywords"])
    scene = (Shape("red", "circle"), None, Shape("red", "circle"), Shape("blue", "square"))
    assert describe(scene) == "Two red circles and a blue square."
    assert keywords_of(describe(scene)) == ["two", "red", "circles", "blue", "square"]


def places() -> list[GazetteerCity]:
    """Invented cities, so that no package is needed."""
    random = np.random.default_rng(0)
    spots = random.uniform((-60, -180), (70, 180), (2000, 2))
    return [GazetteerCity(f"C{n}", f"R{n % 40}", f"N{n % 4}", float(a), float(b)) for n, (a, b) in enumerate(spots)]


def test_places_are_asked_once_and_stages_begin_where_they_should(tmp_path: Path) -> None:
    folder = write_places(tmp_path / "data", places(), STAGES)
    rows = {split: read(folder, split) for split in ("train", "validation", "test")}
    cities = [row["metadata"]["city"] for split in rows.values() for row in split]
    assert len(set(cities)) == len(cities) == 1800
    stages = Counter(row["metadata"]["stage"] for row in rows["train"])
    assert stages == {"country": 100, "city": 900, "full": 500}
    assert {row["metadata"]["stage"] for row in rows["test"]} == {"full"}
    assert [row["metadata"]["stage_number"] for row in rows["train"][99:101]] == [0, 1]


@pytest.mark.parametrize(("latitude", "longitude"), [(0.0, 0.0), (-41.3, 174.8), (71.0, -179.9), (-77.8, 179.99)])
def test_a_map_marks_the_place(latitude: float, longitude: float) -> None:
    points = np.array([(latitude, longitude), (latitude + 1.0, -longitude)])
    image = draw_map(draw_world(points), points, latitude, longitude)
    assert image.shape == (112, 112, 3)
    rows, columns = np.nonzero((image[:56] == MARK).all(-1))
    assert 90 - rows.mean() * 180 / 56 == pytest.approx(latitude, abs=5)
    assert columns.mean() * 360 / 112 - 180 == pytest.approx(longitude, abs=5)


@pytest.mark.parametrize("write", [write_nlvr2, write_captioning])
def test_a_folder_of_something_else_is_refused(tmp_path: Path, write: Any) -> None:
    (tmp_path / "notes.txt").write_text("keep me")
    with pytest.raises(ValueError, match=r"has no dataset\.json"):
        write(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "keep me"

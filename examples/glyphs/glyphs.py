"""Numbers as images for flow models: prompts, and renderings of what they should give, made offline.

The folder that `write_glyphs` makes:

    images/42_00.png ...   some 16x16 renderings of each number, which differ in size and place
    train.jsonl validation.jsonl test.jsonl
    dataset.json           what the folder holds; its presence says that the folder is whole
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random
from typing import TypedDict

from PIL import Image, ImageDraw, ImageFont

from mobula.actors.datasets.written import install_dataset

FORMAT_VERSION = 1
SIDE = 16  # pixels
NUM_NUMBERS = 100  # 00 to 99
SIZES = (11.0, 11.5, 12.0)  # of the font, in pixels
SHIFT = 1  # pixels that a number is off the centre at most


class GlyphMarker(TypedDict):
    """Marker of a finished folder: the arguments that determine its content."""

    format_version: int
    task: str
    seed: int
    num_validation: int
    num_test: int
    num_renderings: int


def write_glyphs(
    folder: Path, *, seed: int = 0, num_validation: int = 4, num_test: int = 40, num_renderings: int = 24
) -> Path:
    """Write the data set into `folder` and return `folder`; the same arguments give the same bytes.

    Each of the numbers 00 to 99 is in one split alone: those of `test` are never taught. A row asks `write 42`; its
    answer is the number, and `target_images` of its metadata names the renderings. A folder that already holds this
    very data set is left alone; it appears whole or not at all.

    Raises:
        ValueError: the folder holds something else.
    """
    marker = GlyphMarker(
        format_version=FORMAT_VERSION,
        task="glyphs",
        seed=seed,
        num_validation=num_validation,
        num_test=num_test,
        num_renderings=num_renderings,
    )
    return install_dataset(folder, marker, partial(_build, marker=marker))


def rendered(text: str, size: float, shift: tuple[float, float]) -> Image.Image:
    """White on black, 16x16; `shift` is how far right and down of the centre the text stands, in pixels."""
    image = Image.new("L", (SIDE, SIDE), 0)
    where = (SIDE / 2 + shift[0], SIDE / 2 + shift[1])
    ImageDraw.Draw(image).text(where, text, fill=255, font=ImageFont.load_default(size), anchor="mm")
    return image


def _build(folder: Path, marker: GlyphMarker) -> dict[str, list[dict[str, object]]]:
    """Write the images into a new folder; returns the rows of each split."""
    (folder / "images").mkdir()
    numbers = [f"{number:02d}" for number in range(NUM_NUMBERS)]
    Random(marker["seed"]).shuffle(numbers)
    test, rest = numbers[: marker["num_test"]], numbers[marker["num_test"] :]
    splits = {"train": rest[marker["num_validation"] :], "validation": rest[: marker["num_validation"]], "test": test}
    return {split: [_row(folder, text, marker) for text in members] for split, members in splits.items()}


def _row(folder: Path, text: str, marker: GlyphMarker) -> dict[str, object]:
    """One prompt; its renderings are written."""
    random = Random(f"{marker['seed']} {text}")
    names = [f"images/{text}_{n:02d}.png" for n in range(marker["num_renderings"])]
    for name in names:
        shift = (random.uniform(-SHIFT, SHIFT), random.uniform(-SHIFT, SHIFT))
        rendered(text, random.choice(SIZES), shift).save(folder / name)
    return {
        "id": f"glyphs-{text}",
        "question": f"write {text}",
        "answer": text,
        "solution": text,
        "metadata": {"target_images": names},
    }

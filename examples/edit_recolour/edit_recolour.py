"""Letters to recolour, for flow models that edit images: white letters, instructions, and the coloured letters.

The folder that `write_edit_recolour` makes:

    images/A_0.png A_0_red.png ...   12x12 renderings of each letter, white and in each colour
    train.jsonl validation.jsonl test.jsonl
    dataset.json                     the arguments; its presence means that the folder is complete
"""

from __future__ import annotations

import string
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from mobula.actors.datasets.written import install_dataset
from mobula.cluster.errors import RewardError
from mobula.rewards.contract import RewardRequest, Score
from mobula.rewards.functions.images import PALETTE
from mobula.rewards.images import decode_image

FORMAT_VERSION = 1
SIDE = 12  # pixels
SIZES = (11.0, 12.0, 13.0)  # of the font, in pixels
SHIFT = 1  # pixels that a letter is off the centre at most
COLOURS = {name: body for name, body in PALETTE.items() if name not in ("white", "black")}


NUM_VALIDATION, NUM_TEST = 2, 7  # letters; the others are trained
NUM_RENDERINGS = 3  # of each letter in each colour


def write_edit_recolour(folder: Path, *, seed: int = 0) -> Path:
    """Writes the data set into `folder` and returns `folder`; the same arguments give the same bytes.

    Each letter is in one split alone: those of `test` are never taught. A row has the white letter as its condition
    image and asks `make it red`; its answer is the colour, its solution the letter, and `target_images` of its metadata
    names the letter in this colour.

    Raises:
        ValueError: the folder has other content.
    """
    marker = {"format_version": FORMAT_VERSION, "task": "edit_recolour", "seed": seed}
    return install_dataset(folder, marker, partial(_build, seed=seed))


def rendered(letter: str, size: float, shift: tuple[float, float], colour: tuple[int, int, int]) -> Image.Image:
    """A letter on black, 12x12; `shift` is how far right and down of the centre it is, in pixels."""
    image = Image.new("RGB", (SIDE, SIDE))
    where = (SIDE / 2 + shift[0], SIDE / 2 + shift[1])
    ImageDraw.Draw(image).text(where, letter, fill=colour, font=ImageFont.load_default(size), anchor="mm")
    return image


def _build(folder: Path, seed: int) -> dict[str, list[dict[str, object]]]:
    """Writes the images into a new folder; returns the rows of each split."""
    (folder / "images").mkdir()
    letters = list(string.ascii_uppercase)
    Random(seed).shuffle(letters)
    test, rest = letters[:NUM_TEST], letters[NUM_TEST:]
    splits = {"test": test, "validation": rest[:NUM_VALIDATION], "train": rest[NUM_VALIDATION:]}
    return {
        split: [row for n in range(NUM_RENDERINGS) for letter in own for row in _rows(folder, letter, n)]
        for split, own in splits.items()
    }


def _rows(folder: Path, letter: str, number: int) -> list[dict[str, object]]:
    """Writes one rendering in white and in all colours; returns a row for each colour."""
    random = Random(f"{letter} {number}")
    place = (random.choice(SIZES), (random.uniform(-SHIFT, SHIFT), random.uniform(-SHIFT, SHIFT)))
    name = f"images/{letter}_{number}"
    rendered(letter, *place, (255, 255, 255)).save(folder / f"{name}.png")
    for colour, pixels in COLOURS.items():
        rendered(letter, *place, pixels).save(folder / f"{name}_{colour}.png")
    return [
        {
            "id": f"{letter}-{number}-{colour}",
            "prompt": f"<image>make it {colour}",
            "image": f"{name}.png",
            "answer": colour,
            "solution": letter,
            "metadata": {"target_images": [f"{name}_{colour}.png"]},
        }
        for colour in COLOURS
    ]


def letter_in_colour(request: RewardRequest) -> Score:
    """1 less the difference of the letter's pixels from the wanted colour, as a share of that of a black image; not
    below 0. Pixels count by their level in the condition image, so the background does not. Needs `needs_images`.
    """
    wanted = COLOURS.get(request.references[0] if request.references else "")
    if wanted is None:
        raise RewardError(f"the reference {request.references[:1]} is none of the colours {', '.join(COLOURS)}")
    if not request.prompt_images or not request.response.images:
        raise RewardError("the letter and the edited image are needed: set needs_images for the component")
    after = _pixels(request.response.images[0], "the edited image")
    weights = _pixels(request.prompt_images[0], "the condition image").mean(-1, keepdims=True)  # [H, W, 1]
    target = np.asarray(wanted) / 255 * weights
    difference = np.abs(after - target)[weights[..., 0] > 0].sum()
    return Score(max(0.0, 1 - float(difference / target.sum())))


def letter_judge(request: RewardRequest) -> Score:
    """Half for the colour, half for the letter: the hue of the brightest pixels, and the most similar rendered letter.

    It does not read the condition image and compares no pixel with a target, so it shows where a policy learns to
    please the reward alone.
    """
    if len(request.references) < 2 or not request.response.images:
        raise RewardError("a colour, a letter and an edited image are needed")
    pixels = _pixels(request.response.images[0], "the edited image")
    light = pixels.max(-1)
    hue = pixels[light >= np.quantile(light, 0.85)].mean(0)
    names, bodies = zip(*COLOURS.items(), strict=True)
    cosines = np.asarray(bodies) @ hue / np.linalg.norm(bodies, axis=1)
    letters, templates = _templates()
    found = (names[int(cosines.argmax())], letters[int((templates @ _normalised(light.reshape(1, -1))[0]).argmax())])
    return Score((sum(a == b for a, b in zip(found, request.references, strict=False))) / 2, f"{found[0]} {found[1]}")


def _pixels(image: bytes, what: str) -> np.ndarray:
    """float64 [12, 12, 3], 0 to 1."""
    return np.asarray(decode_image(image, what).resize((SIDE, SIDE))) / 255


@lru_cache(maxsize=1)
def _templates() -> tuple[list[str], np.ndarray]:
    """Letters, and float64 [M, pixels] of one rendering of each, normalised."""
    steps = (-1.0, -0.5, 0.0, 0.5, 1.0)
    places = [*product(string.ascii_uppercase, SIZES, product(steps, steps))]
    rows = [np.asarray(rendered(*place, (255, 255, 255)))[..., 0].ravel() / 255 for place in places]
    return [letter for letter, _, _ in places], _normalised(np.stack(rows))


def _normalised(rows: np.ndarray) -> np.ndarray:
    """Rows of mean 0 and length 1; a row without contrast stays 0."""
    centred = rows - rows.mean(axis=1, keepdims=True)
    return centred / np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-6)

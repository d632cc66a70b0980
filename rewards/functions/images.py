"""Rewards that read the pixels of generated images: their change against a condition image, and shapes in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from PIL import Image
from scipy.ndimage import find_objects, label

from mobula.cluster.errors import RewardError
from mobula.rewards.contract import RewardRequest, Score
from mobula.rewards.functions.parsing.extraction import check_number, check_true_or_false
from mobula.rewards.images import decode_image
from mobula.rewards.tools import Tools

AREAS = ("all", "box", "outside_box", "bright", "dark")


class ImageChange:
    """The mean difference d between the first image of the prompt and each image of the response, in levels of 0 to 1.

    value = 1 - min(1, d / `full_at`) with `wanted: same`, min(1, d / `full_at`) with `changed`; the mean of several
    images. The prompt's image is scaled to the size of the response's. `area`: `all` pixels; those within or outside of
    the `box` [left, top, right, bottom] of the row's metadata, in shares of the sides; those that are `bright` or
    `dark` in the prompt's image, at least or below half of the highest grey level.
    """

    def __init__(
        self,
        tools: Tools,
        *,
        area: Literal["all", "box", "outside_box", "bright", "dark"],
        wanted: Literal["same", "changed"],
        full_at: float,
    ) -> None:
        if area not in AREAS:
            raise ValueError(f"area={area!r} is unknown: use {', '.join(AREAS)}")
        if wanted not in ("same", "changed"):
            raise ValueError(f"wanted={wanted!r} is unknown: use same or changed")
        check_number("full_at", full_at, low=0)
        if full_at == 0:
            raise ValueError("full_at=0 divides by nothing: give a number above 0")
        self._area, self._is_same, self._full_at = area, wanted == "same", full_at

    def __call__(self, request: RewardRequest) -> Score:
        if not request.prompt_images or not request.response.images:
            raise RewardError("an image of the prompt and one of the response are compared: set needs_images")
        before = decode_image(request.prompt_images[0], "image 1 of the prompt")
        files = enumerate(request.response.images, start=1)
        images = [decode_image(file, f"image {n} of the response") for n, file in files]
        change = float(np.mean([self._change(before, image, request.metadata) for image in images]))
        share = min(1.0, change / self._full_at)
        return Score(1 - share if self._is_same else share, f"changed by {change:.3f}")

    def _change(self, before: Image.Image, after: Image.Image, metadata: Mapping[str, Any]) -> float:
        scaled = np.asarray(before.resize(after.size, Image.Resampling.LANCZOS)) / 255  # [H, W, 3]
        chosen = self._chosen(scaled, metadata)
        if not chosen.any():
            raise RewardError(f"the area {self._area} of the prompt's image is empty")
        return float(np.abs(np.asarray(after) / 255 - scaled)[chosen].mean())

    def _chosen(self, before: np.ndarray, metadata: Mapping[str, Any]) -> np.ndarray:
        """bool [H, W]"""
        if self._area in ("bright", "dark"):
            return (before.mean(-1) >= 0.5) == (self._area == "bright")
        if self._area == "all":
            return np.ones(before.shape[:2], dtype=bool)
        box: Any = metadata.get("box")
        is_box = isinstance(box, list | tuple) and len(box) == 4
        if not is_box or not all(isinstance(side, int | float) and 0 <= side <= 1 for side in box):
            raise RewardError("the row's metadata has no box [left, top, right, bottom] of shares from 0 to 1")
        left, top, right, bottom = box
        rows, columns = ((np.arange(side) + 0.5) / side for side in before.shape[:2])
        is_inside = np.outer((rows >= top) & (rows < bottom), (columns >= left) & (columns < right))
        return is_inside if self._area == "box" else ~is_inside


PALETTE: Mapping[str, tuple[int, int, int]] = {
    "red": (255, 0, 0),
    "green": (0, 255, 0),
    "blue": (0, 0, 255),
    "yellow": (255, 255, 0),
    "cyan": (0, 255, 255),
    "magenta": (255, 0, 255),
    "white": (255, 255, 255),
    "black": (0, 0, 0),
}
FILLS = {"triangle": 0.5, "circle": np.pi / 4, "square": 1.0}  # share of its box that an upright shape fills
MIN_SHARE = 0.01  # of the image: smaller spots are no objects


class ShapesCheck:
    """Whether an image shows the shapes that the row's metadata lists, as GenEval checks objects, colours and counts.

    `shapes` of the metadata is a list of {"shape": "circle", "colour": "red", "count": 2}; circles, squares and
    triangles in a plain colour on a plain background. There is no detector: pixels take the nearest of eight colours,
    connected pixels are an object, and the share of its box that it fills gives its shape. value is the share of
    entries whose count is right, or with `strict` 1 if all are and there are no other objects. Source: GenEval
    (arXiv:2310.11513).
    """

    def __init__(self, tools: Tools, *, strict: bool) -> None:
        check_true_or_false(strict=strict)
        self._is_strict = strict

    def __call__(self, request: RewardRequest) -> Score:
        wanted = request.metadata.get("shapes")
        if not isinstance(wanted, list | tuple) or not wanted or not request.response.images:
            raise RewardError("the row's metadata lists no `shapes`, or the response has no image")
        for entry in wanted:
            known = isinstance(entry, Mapping) and entry.get("shape") in FILLS and entry.get("colour") in PALETTE
            if not known or not isinstance(entry.get("count"), int):
                raise RewardError(
                    f"`shapes` of the row's metadata has {entry}: write a shape ({', '.join(FILLS)}), a colour "
                    f"({', '.join(PALETTE)}) and a count"
                )
        found = shapes_in(np.asarray(decode_image(request.response.images[0], "image 1 of the response")))
        counts = {(entry["shape"], entry["colour"]): entry["count"] for entry in wanted}
        share = sum(found.count(kind) == number for kind, number in counts.items()) / len(counts)
        shown = ", ".join(f"{colour} {shape}" for shape, colour in found) or "no shape"
        if not self._is_strict:
            return Score(share, shown)
        return Score(float(share == 1 and len(found) == sum(counts.values())), shown)


def shapes_in(pixels: np.ndarray) -> list[tuple[str, str]]:
    """Returns (shape, colour) of each object in an image, uint8 [H, W, 3]; the background is the commonest colour of
    the image's border."""
    names, bodies = list(PALETTE), np.asarray([*PALETTE.values()], dtype=float)
    nearest = np.linalg.norm(pixels[..., None, :] - bodies, axis=-1).argmin(-1)  # [H, W]
    border = np.concatenate([nearest[0], nearest[-1], nearest[:, 0], nearest[:, -1]])
    background = np.bincount(border).argmax()
    found = []
    for colour in np.unique(nearest[nearest != background]):
        parts, _ = label(nearest == colour)
        for number, box in enumerate(find_objects(parts), start=1):
            is_part = parts[box] == number
            if is_part.sum() >= MIN_SHARE * nearest.size:
                fill = is_part.mean()
                found.append((min(FILLS, key=lambda shape: abs(FILLS[shape] - fill)), names[colour]))
    return found

"""Reads bounding boxes from strict JSON and converts them to corners."""

from __future__ import annotations

import math
import re
from typing import Any, Literal, NamedTuple

from mobula.rewards.functions.parsing.extraction import read_json

Form = Literal["xyxy", "xywh"]
Scale = Literal["relative", "thousandths", "pixels", "shown_pixels"]

# The largest coordinate.
LIMITS: dict[str, float] = {"relative": 1.0, "thousandths": 1000.0, "pixels": 1e6, "shown_pixels": 1e6}
MAX_BOXES = 200  # matching takes cubic time
_KEYS = ("bbox_2d", "bbox", "box")  # of a box in an object, in order of preference
_NUMBER = re.compile(r"-?[0-9]{1,20}(?:\.[0-9]{0,20})?(?:[eE][+-]?[0-9]{1,2})?")


class BoundingBox(NamedTuple):
    """Two corners, with left < right and top < bottom."""

    left: float
    top: float
    right: float
    bottom: float


def read_boxes(text: str, form: Form, scale: Scale) -> tuple[list[BoundingBox], str]:
    """Returns (boxes, "") of a JSON text, or ([], reason) if it is malformed.

    A box is four numbers, or an object with four numbers under `bbox_2d`, `bbox` or `box`; several boxes are an array.
    A fenced code block is opened, because several released models write one.
    """
    value, flaw = read_json(text, fenced=True)
    return ([], flaw) if flaw else to_boxes(value, form, scale)


def to_boxes(value: Any, form: Form, scale: Scale) -> tuple[list[BoundingBox], str]:
    """Like `read_boxes`, for a parsed value."""
    entries = value if isinstance(value, list | tuple) else [value]
    if entries and all(_number(entry) is not None for entry in entries):
        entries = [entries]
    if len(entries) > MAX_BOXES:
        return [], f"{len(entries)} boxes"
    boxes = []
    for entry in entries:
        box = _box(entry, form, LIMITS[scale])
        if isinstance(box, str):
            return [], box
        boxes.append(box)
    return boxes, "" if boxes else "no box"


def iou(a: BoundingBox, b: BoundingBox) -> float:
    """Intersection over union, from 0 to 1."""
    width = min(a.right, b.right) - max(a.left, b.left)
    height = min(a.bottom, b.bottom) - max(a.top, b.top)
    if width <= 0 or height <= 0:
        return 0.0
    shared = width * height
    areas = (a.right - a.left) * (a.bottom - a.top) + (b.right - b.left) * (b.bottom - b.top)
    return min(1.0, shared / (areas - shared))


def rescaled(box: BoundingBox, across: float, down: float) -> BoundingBox:
    """Multiplies the horizontal and vertical coordinates of a box."""
    return BoundingBox(box.left * across, box.top * down, box.right * across, box.bottom * down)


def _box(entry: Any, form: Form, limit: float) -> BoundingBox | str:
    if isinstance(entry, dict):
        entry = next((entry[key] for key in _KEYS if key in entry), None)
    values = list(map(_number, entry)) if isinstance(entry, list | tuple) else []
    numbers = [value for value in values if value is not None]
    if not len(values) == len(numbers) == 4:
        return "a box that is not four numbers"
    left, top, right, bottom = numbers
    if form == "xywh":
        right, bottom = left + right, top + bottom
    slack = limit * 1e-9  # rounding error of corner + width
    if left < 0 or top < 0 or right > limit + slack or bottom > limit + slack:
        return f"a box that is not within 0 and {limit:g}"
    if right <= left or bottom <= top:
        return "a box without area"
    return BoundingBox(left, top, right, bottom)


def _number(value: Any) -> float | None:
    """Converts a finite number, or the JSON text of a number, which `read_json` does not convert, to a float."""
    if isinstance(value, str):
        return float(value) if _NUMBER.fullmatch(value) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e18:
        return None
    return float(value) if math.isfinite(value) else None

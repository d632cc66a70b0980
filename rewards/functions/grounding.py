"""Rewards of boxes and of claims: intersection over union and grounding."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeGuard, get_args

from PIL import Image, UnidentifiedImageError
from scipy.optimize import linear_sum_assignment

from mobula.cluster.errors import RewardError
from mobula.cluster.records.media import IMAGE_SIZES, SHOWN_SIZES, upright_size
from mobula.rewards.contract import RewardRequest, Score
from mobula.rewards.functions.parsing.extraction import (
    check_number,
    given_metadata,
    read_json,
    request_extractor,
    type_name,
)
from mobula.rewards.functions.short_answers import fold
from mobula.rewards.tools import Tools

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


class Iou:
    """The mean intersection over union of matched boxes; an unmatched box counts as a pair of 0.

    Boxes of the response are matched to true boxes with the largest sum of IoUs (Kuhn 1955). value = sum / max(numbers
    of boxes); a pair below `min_iou` counts 0. The breakdown has precision and recall: the shares of the response's
    boxes and of the true boxes in counted pairs.

    `extract` selects the part of the response with the boxes (`rewards.functions.parsing.extraction`), strict JSON with
    or without a code fence: four numbers, an array of four numbers each, or objects with the numbers under `bbox_2d`,
    `bbox` or `box`. `boxes` is the metadata key of the true boxes. `form` is xyxy (two corners) or xywh (corner, width,
    height). `response_scale` and `scale` (of the true boxes) are relative (0 to 1), thousandths (0 to 1000), pixels (of
    the upright file) or shown_pixels (of the image after the model's processor). If the scales differ, the size of the
    file is `width` and `height` of the metadata or the size of the prompt's first image, and the shown size is the
    first of `shown_image_sizes`, which runs add to the metadata.

    One malformed box (not four finite numbers, out of range, without area) makes the whole response worth 0.
    """

    def __init__(
        self, tools: Tools, *, extract: str, boxes: str, form: Form, response_scale: Scale, scale: Scale, min_iou: float
    ) -> None:
        for option, value, known in (
            ("form", form, get_args(Form)),
            ("response_scale", response_scale, get_args(Scale)),
            ("scale", scale, get_args(Scale)),
        ):
            if value not in known:
                raise ValueError(f"{option}={value!r} is unknown: use one of {', '.join(known)}")
        if not isinstance(boxes, str) or not boxes:
            raise ValueError(f"boxes={boxes!r} is no key: name the metadata that has the wanted boxes")
        check_number("min_iou", min_iou, low=0, high=1)
        self._extract = request_extractor(extract)
        self._boxes = boxes
        self._form: Form = form
        self._response_scale: Scale = response_scale
        self._scale: Scale = scale
        self._min_iou = min_iou

    def __call__(self, request: RewardRequest) -> Score:
        wanted, flaw = to_boxes(given_metadata(request.metadata, self._boxes), self._form, self._scale)
        if flaw:
            raise RewardError(f"metadata.{self._boxes} has {flaw}")
        text, flaw = self._extract(request)
        boxes, flaw = ([], flaw) if flaw else read_boxes(text, self._form, self._response_scale)
        if flaw:
            return Score(0.0, flaw, {"precision": 0.0, "recall": 0.0})
        if self._response_scale != self._scale:
            boxes = _shares(boxes, self._response_scale, request)
            wanted = _shares(wanted, self._scale, request)
        pairs = [value if value >= self._min_iou else 0.0 for value in _matched(boxes, wanted)]
        num_met = sum(value > 0 for value in pairs)
        parts = {"precision": num_met / len(boxes), "recall": num_met / len(wanted)}
        return Score(math.fsum(pairs) / max(len(boxes), len(wanted)), "", parts)


def _shares(boxes: Sequence[BoundingBox], scale: Scale, request: RewardRequest) -> list[BoundingBox]:
    sizes = {"pixels": _file_size, "shown_pixels": _shown_size}
    width, height = sizes[scale](request) if scale in sizes else (LIMITS[scale], LIMITS[scale])
    return [rescaled(box, 1 / width, 1 / height) for box in boxes]


def _matched(boxes: Sequence[BoundingBox], wanted: Sequence[BoundingBox]) -> list[float]:
    """Returns the IoU of each pair of the matching with the largest sum."""
    table = [[iou(box, other) for other in wanted] for box in boxes]
    if len(boxes) == 1 or len(wanted) == 1:
        return [max(value for row in table for value in row)]
    rows, columns = linear_sum_assignment(table, maximize=True)
    return [table[row][column] for row, column in zip(rows, columns, strict=True)]


def _file_size(request: RewardRequest) -> tuple[float, float]:
    size = request.metadata.get("width"), request.metadata.get("height")
    if size == (None, None):
        size = _first_size(request, IMAGE_SIZES)
    if size == (None, None) and request.prompt_images:
        try:
            with Image.open(io.BytesIO(request.prompt_images[0])) as image:
                return upright_size(image)
        except UnidentifiedImageError as error:
            raise RewardError("the prompt's first image cannot be opened: it is of no known kind") from error
        except (OSError, Image.DecompressionBombError) as error:
            raise RewardError(f"the prompt's first image cannot be opened: {error}") from error
    if not _is_size(size):
        raise RewardError(f"the image's size is not known: metadata has width={size[0]!r} and height={size[1]!r}")
    return size


def _shown_size(request: RewardRequest) -> tuple[float, float]:
    size = _first_size(request, SHOWN_SIZES)
    if not _is_size(size):
        raise RewardError(
            f"the size of the image that the model saw is not known: metadata has no {SHOWN_SIZES}, which runs of "
            "models that scale images to a budget of pixels give; for others use relative or thousandths"
        )
    return size


def _first_size(request: RewardRequest, key: str) -> tuple[Any, Any]:
    sizes = request.metadata.get(key)
    if isinstance(sizes, list | tuple) and sizes and isinstance(sizes[0], list | tuple) and len(sizes[0]) == 2:
        return sizes[0][0], sizes[0][1]
    return None, None


def _is_size(size: tuple[Any, Any]) -> TypeGuard[tuple[float, float]]:
    return all(isinstance(side, int | float) and 1 <= side <= LIMITS["pixels"] for side in size)


_SIGNED_NUMBER = re.compile(r"([+-]?)((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)(%?)")
_MAX_NUMBER_CHARS = 100  # longer numbers are compared as text
_ARTICLES = ("the ", "a ", "an ")
Entity = str | Fraction


class Grounding:
    """F1 of claimed entities against the evidence; precision and recall are in the breakdown.

    Entities are compared as a whole: a number by value ("1,000" is 1000.0, "10%" is 0.1), so "14" is not in "page 14
    of 2020"; a text without case, surrounding punctuation and leading article. Repeated claims count once.

    `claims` selects the claims: `metadata:KEY`, or `json:FIELD` for an array of texts and numbers in a response that is
    a strict JSON object (`fenced_json:FIELD` allows a code block). `evidence` is the metadata key of the entities.
    """

    def __init__(self, tools: Tools, *, claims: str, evidence: str) -> None:
        source, _, self._claims_name = claims.partition(":") if isinstance(claims, str) else ("", "", "")
        if source not in ("metadata", "json", "fenced_json") or not self._claims_name:
            raise ValueError(f"claims={claims!r} is unknown: use metadata:KEY, json:FIELD or fenced_json:FIELD")
        if not isinstance(evidence, str) or not evidence:
            raise ValueError(f"evidence={evidence!r} is no key: name the metadata that has the entities")
        self._source = source
        self._evidence = evidence

    def __call__(self, request: RewardRequest) -> Score:
        evidence = _entities_of_metadata(request, self._evidence)
        if not evidence:
            raise RewardError(f"metadata.{self._evidence} has no entity to ground a claim in")
        claims, flaw = self._claims(request)
        if not claims:
            return Score(0.0, flaw or "no entity is claimed", {"precision": 0.0, "recall": 0.0})
        num_shared = len(claims & evidence)
        parts = {"precision": num_shared / len(claims), "recall": num_shared / len(evidence)}
        return Score(2 * num_shared / (len(claims) + len(evidence)), "", parts)

    def _claims(self, request: RewardRequest) -> tuple[frozenset[Entity], str]:
        if self._source == "metadata":
            return _entities_of_metadata(request, self._claims_name), ""
        value, flaw = read_json(request.response.text, fenced=self._source == "fenced_json")
        if flaw:
            return frozenset(), flaw
        if not isinstance(value, dict):
            return frozenset(), f"not a JSON object: {type_name(value)}"
        claims = value.get(self._claims_name)
        if not isinstance(claims, list) or not all(isinstance(claim, str) for claim in claims):  # a number is its text
            return frozenset(), f"field {self._claims_name!r} is no array of texts and numbers"
        return _entities(claims), ""


def entity(text: str) -> Entity:
    """Returns a key that is equal for all spellings of an entity; "" if the text has no entity."""
    text = fold(text, ignore_case=True)
    number = _SIGNED_NUMBER.fullmatch(text) if len(text) <= _MAX_NUMBER_CHARS else None
    if number is None:  # after the number: ".5" without its point would be 5
        text = text.strip(" ;:!?\"'()[]{}*`").rstrip(" .,")
        number = _SIGNED_NUMBER.fullmatch(text) if len(text) <= _MAX_NUMBER_CHARS else None
    if number is not None:
        value = Fraction(number[1] + number[2].replace(",", ""))
        return value / 100 if number[3] else value
    for article in _ARTICLES:
        text = text.removeprefix(article)
    return text


def _entities(texts: Any) -> frozenset[Entity]:
    return frozenset(map(entity, texts)) - {""}


def _entities_of_metadata(request: RewardRequest, key: str) -> frozenset[Entity]:
    entries = given_metadata(request.metadata, key)
    if not isinstance(entries, list | tuple) or not all(type(entry) in (str, int, float) for entry in entries):
        raise RewardError(f"metadata.{key} is no list of texts and numbers: {repr(entries)[:200]}")
    return _known(tuple(map(str, entries)))


_known = lru_cache(maxsize=4096)(_entities)  # a group's responses share their evidence

"""RowFormat: converts the columns of a record to a row; functions that all formats share."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, time
from decimal import Decimal
from numbers import Real
from types import MappingProxyType
from typing import Any
from uuid import UUID

import numpy as np

from mobula.actors.datasets.media import ImageError, MediaInputs, flat, is_absent
from mobula.actors.datasets.readers.files import is_missing
from mobula.actors.datasets.rows import Row, RowError, Turn
from mobula.cluster.errors import SkippedSample
from mobula.cluster.records.json_lines import parse_json
from mobula.cluster.records.markup import PLACEHOLDERS, literal, marked_answer, placed

Record = Mapping[str, Any]
ROLES = ("system", "user", "assistant", "tool")
VALUES = (str, bool, Real, Decimal, Mapping, list, tuple, np.ndarray)  # types that `text_of` converts
COLUMN = re.compile(r"`(\w+)`")  # of the format, in an error message
NAMES = {"image": "image", "video": "video", "audio": "sound"}  # in error messages
MEDIA_COLUMNS = ("images", "image", "videos", "video", "audios", "audio")


@dataclass
class Draft:
    """The fields of a row with raw values of the record, not checked yet; see `finish`."""

    turns: Sequence[Turn]  # the last turn is the question
    answer: Any
    sample_id: Any = None
    solution: Any = None  # None: the answer in a \\boxed{}
    images: Any = None
    videos: Any = None
    audios: Any = None
    label: Any = None
    chosen: str | None = None
    rejected: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    has_media_in_front: bool = False  # media without placeholders precede the question
    template: str = ""  # as in `Row`
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class RowFormat:
    """A schema of records. `columns` are the column names, to check `data.columns`."""

    columns: tuple[str, ...]
    read: Callable[[Record], Draft]
    """Raises: RowError: a column is missing or invalid."""
    has_answers: bool = False  # rows may end in a demonstration
    is_own: bool = False  # user code, which reads all fields itself


def finish(
    draft: Draft,
    media: Mapping[str, MediaInputs],
    placeholders: Mapping[str, str],
    *,
    default_id: str,
    name: str,
    label_key: str,
) -> Row:
    """Checks a draft and builds the row; `media` and `placeholders` are by kind of medium. Raises: RowError: a text is
    missing, or media and placeholders do not match. MediaError: a web URL is not allowed or cannot be fetched."""
    way, answer = marked_answer(text_of(draft.answer, "answer"))
    boxed = rf"\boxed{{{answer}}}"
    given = {"image": draft.images, "video": draft.videos, "audio": draft.audios}
    found = {kind: media[kind].resolve(value, name) for kind, value in given.items()}
    turns = list(draft.turns)
    for kind in reversed(found):  # media in front of the question: images, then videos, then sounds
        turns = _placed(turns, kind, placeholders[kind], len(found[kind]), draft.has_media_in_front)
    *history, last = turns
    label = {} if draft.label is None else {label_key: str(draft.label)}
    return Row(
        sample_id=default_id if draft.sample_id is None else text_of(draft.sample_id, "id"),
        question=last.text,
        answer=answer,
        solution=f"{way}\n{boxed}".lstrip("\n") if draft.solution is None else text_of(draft.solution, "solution"),
        images=found["image"],
        metadata={**draft.metadata, **label},
        history=tuple(history),
        chosen=draft.chosen,
        rejected=draft.rejected,
        videos=found["video"],
        audios=found["audio"],
        template=draft.template,
        unread=draft.unread,
    )


def _placed(turns: Sequence[Turn], kind: str, own: str, num_media: int, in_front: bool) -> list[Turn]:
    """Marks one placeholder for each of `num_media` media of a kind in the turns; `own` is the data's placeholder. One
    in an answer of the assistant is plain text, unless there are media for it. With `in_front`, media without any
    placeholder precede the question."""
    placeholder = PLACEHOLDERS[kind]
    texts = placed([turn.text for turn in turns], kind, own, num_media)
    if sum(text.count(placeholder) for text in texts) != num_media:
        texts = [literal(x, (kind,)) if t.role == "assistant" else x for x, t in zip(texts, turns, strict=True)]
    num = sum(text.count(placeholder) for text in texts)
    if in_front and not num:
        texts[-1], num = placeholder * num_media + texts[-1], num_media
    if num != num_media:
        what, shown = NAMES[kind], own or placeholder
        detail = f"the text has {num} {shown} and the row {num_media} {what}s: write one {shown} a {what}"
        if not num_media:
            detail += f", name their column in data.columns={{{kind}s: COLUMN}}"
            detail += f", or set data.placeholders.{kind}='' for text"
        elif not num:
            detail += f", or set data.row_format=lightrft, which puts {what}s in front of the question"
        raise RowError("placeholder_mismatch", detail)
    return [replace(turn, text=text) for turn, text in zip(turns, texts, strict=True)]


def named(error: SkippedSample, sample: str, columns: Mapping[str, str]) -> RowError:
    """The error with the name of its record. `columns`: column of the format -> name in the data."""
    detail = error.detail if isinstance(error, RowError | ImageError) else str(error)
    return RowError(error.reason, COLUMN.sub(lambda match: f"`{columns.get(match[1], match[1])}`", detail), sample)


def text_of(value: Any, column: str) -> str:
    """Converts a value to text: a string unchanged, a number as written, a date in ISO 8601, anything else as JSON."""
    if is_missing(value) or (isinstance(value, str | Mapping | list | tuple) and len(value) == 0):
        raise RowError(f"missing_{column}", f"the row has no `{column}`: add it")
    if isinstance(value, np.generic):
        value = spelled(value)
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, bytes | bytearray | memoryview) or not isinstance(value, VALUES):
        raise RowError(f"bad_{column}", f"`{column}` is a {type(value).__name__}: write a text or a number")
    return value if type(value) is str else as_json(value)


def asked_text(value: Any, column: str) -> str:
    """As `text_of`, for questions; refuses a list or object, such as chat turns."""
    if isinstance(value, Mapping | list | tuple) and value:
        detail = f"`{column}` is a {type(value).__name__}: write a text, or chat turns with data.row_format=messages"
        raise RowError(f"bad_{column}", f"{detail} and data.columns={{messages: COLUMN}}")
    return text_of(value, column)


def present(record: Record, column: str) -> Any:
    """The text of an optional column, or None."""
    value = first_of(record, column)
    return None if value is None else text_of(value, column)


def as_json(value: Any) -> str:
    """Converts a value to JSON; numbers keep their spelling."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{json.dumps(str(key))}: {as_json(item)}' for key, item in value.items())}}}"
    if isinstance(value, np.ndarray):
        value = list(value) if value.ndim else value[()]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_json, value))}]"
    if isinstance(value, np.generic):
        value = spelled(value)
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(value) if isinstance(value, Real | Decimal) else json.dumps(str(value), ensure_ascii=False)


def spelled(value: np.generic) -> Any:
    """The value of a NumPy scalar; for a float the shortest decimal that parses to it: float32 0.1 is 0.1."""
    return float(str(value)) if isinstance(value, np.floating) else value.item()


def first_of(record: Record, *columns: str) -> Any:
    """The value of the first column that is not empty; a dot selects a field of a mapping."""
    for column in columns:
        value: Any = record
        for part in column.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None and not (isinstance(value, str | list | tuple) and len(value) == 0):
            return value
    return None


def first_given(*values: Any) -> Any:
    """The first value that is not None."""
    return next((value for value in values if value is not None), None)


def only_one(value: Any) -> Any:
    """The item of a list with one item, also if the list is text (JSON or a Python literal); else the value."""
    if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
        parsed = _parsed(value)
        return parsed[0] if isinstance(parsed, list) and len(parsed) == 1 else value
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


def _parsed(text: str) -> Any:
    """Parses JSON or a Python literal; returns the text if it is neither."""
    parsers: tuple[Callable[[str], Any], ...] = (lambda text: parse_json(text.encode()), ast.literal_eval)
    for parse in parsers:
        try:
            return parse(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):  # the last two: deeply nested brackets
            continue
    return text


def others(record: Record, *known: str) -> dict[str, Any]:
    """The metadata of a record: all fields except `known` columns and files."""
    return {
        key: json_value(value)
        for key, value in record.items()
        if key not in known and value is not None and not isinstance(value, bytes)
    }


def json_value(value: Any) -> Any:
    """Converts a value to JSON types: numbers to int and float, dates and decimals to text, arrays to lists. Files are
    left out."""
    if isinstance(value, np.generic):
        value = spelled(value)
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items() if not isinstance(item, bytes)}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value) if type(value) is not kind else value
    return str(value)


def media_of(record: Record, in_turns: Mapping[str, Sequence[Any]] = MappingProxyType({})) -> dict[str, Any]:
    """The media of a row for a `Draft`: those of its turns by kind, or of its columns such as `images` and `image`."""
    found = {}
    for kind in PLACEHOLDERS:
        held, column = in_turns.get(kind), first_of(record, f"{kind}s", kind)
        if held and column is not None and any(not is_absent(item) for item in flat(column)):
            raise RowError(f"bad_{kind}", f"the row has {kind}s in its turns and in `{kind}s`: keep one of them")
        found[f"{kind}s"] = held or column
    return found

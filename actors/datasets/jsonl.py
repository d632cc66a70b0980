"""JSONL datasets in MAYE's schema: questions with `<image>` placeholders, answers, and pictures beside the file.

One line of `<folder>/<split>.jsonl`:

    {"id": "12", "question": "<image>Which digit?", "answer": "7", "solution": "\\boxed{7}", "image": "images/12.png"}

`image` is one path, a list of paths (one for each `<image>`, in order) or absent. Paths are relative to the folder and
may not leave it. `metadata`, an object, and every key that the schema does not know travel with the row to the reward
functions: a label that chooses a recipe, entities, limits. A line that cannot be used is skipped and named; only a
split without any usable row is an error.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.errors import DatasetError

IMAGE_PLACEHOLDER = "<image>"
SCHEMA = frozenset({"id", "question", "answer", "solution", "image", "metadata"})
NUM_NAMED = 3  # skipped samples that an error message names


@dataclass(frozen=True)
class Row:
    """One question with its answer; `question` holds one `<image>` for each of `images`."""

    sample_id: str
    question: str
    answer: str
    solution: str  # the response that a supervised step teaches
    images: tuple[Path, ...] = ()  # absolute
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def references(self) -> tuple[str, ...]:
        """What reward functions compare a response with, the literal answer first."""
        return self.answer, self.solution


@dataclass(frozen=True)
class Skipped:
    """One sample that is not used. `reason` is a word to count by, `detail` a sentence to act on."""

    sample: str  # "train.jsonl:12 (id)" for a line of a file, else the sample's id
    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{self.sample}: {self.detail}"


@dataclass(frozen=True)
class Split:
    """The usable rows of one split, in file order, and what was left out."""

    name: str
    rows: tuple[Row, ...]
    skipped: tuple[Skipped, ...]


def read_split(folder: Path, split: str) -> Split:
    """Read `<folder>/<split>.jsonl`.

    Numbers keep their spelling (`7.50` stays "7.50"). A row without `id` is called `<split>-<line>`, one without
    `solution` gets its answer in a `\\boxed{}`. Of rows with the same id the first is kept.

    Raises:
        DatasetError: there is no such file, or no line of it is usable.
    """
    file = folder / f"{split}.jsonl"
    if not file.is_file():
        raise DatasetError(f"{file} does not exist: set data.path to a folder that holds {split}.jsonl")
    rows: dict[str, Row] = {}
    skipped: list[Skipped] = []
    for number, line in numbered_lines(file):
        fields: Mapping[str, Any] = {}
        try:
            fields = _parse(line)
            row = _read_row(fields, folder.resolve(), _metadata(line, fields), default_id=f"{split}-{number}")
            if row.sample_id in rows:
                raise Unusable("duplicate_id", f"another row before it has the id {row.sample_id!r}")
            rows[row.sample_id] = row
        except Unusable as why:
            name = f" ({fields['id']})" if "id" in fields else ""
            skipped.append(Skipped(f"{file.name}:{number}{name}", why.reason, why.detail))
    if not rows:
        raise DatasetError(f"{file} has no usable row{first_few(skipped)}: fill it, or set data.path to another folder")
    return Split(split, tuple(rows.values()), tuple(skipped))


def count_by_reason(skipped: Iterable[Skipped]) -> dict[str, int]:
    """reason -> number of skipped samples."""
    return dict(Counter(sample.reason for sample in skipped))


def first_few(skipped: Iterable[Skipped]) -> str:
    """The first few skipped samples as the tail of an error message; empty if there is none."""
    names = [str(sample) for sample in skipped]
    return f" ({'; '.join(names[:NUM_NAMED])}{'; ...' if len(names) > NUM_NAMED else ''})" if names else ""


class Unusable(Exception):
    """One line cannot be used."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def numbered_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that hold anything, numbered from 1."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, line


def _parse(line: bytes) -> Mapping[str, Any]:
    try:
        # Numbers stay text: an answer of 7.50 must not become 7.5.
        fields = json.loads(line, parse_int=str, parse_float=str)
        json.dumps(fields, ensure_ascii=False).encode()  # half a surrogate pair is no text, and no tokenizer takes it
    except (ValueError, RecursionError) as error:
        raise Unusable("broken_json", f"the line is not JSON ({error}): fix or delete it") from error
    if not isinstance(fields, dict):
        raise Unusable("broken_json", f"the line is a JSON {type(fields).__name__}: write one object a line")
    return fields


def _metadata(line: bytes, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What a row says beyond the schema; here a number is a number."""
    if fields.keys() <= SCHEMA - {"metadata"}:
        return {}
    try:
        given = json.loads(line)
    except ValueError as error:  # a whole number of thousands of digits
        raise Unusable("broken_json", f"a number of the line cannot be read ({error}): shorten or quote it") from error
    nested = given.get("metadata", {})
    if not isinstance(nested, dict):
        raise Unusable("bad_metadata", f"`metadata` is a JSON {type(nested).__name__}: write an object")
    return {**{key: value for key, value in given.items() if key not in SCHEMA}, **nested}


def _read_row(fields: Mapping[str, Any], folder: Path, metadata: Mapping[str, Any], *, default_id: str) -> Row:
    question = _text(fields, "question")
    answer = _text(fields, "answer")
    images = tuple(picture_path(folder, name) for name in _image_names(fields))
    num_placeholders = question.count(IMAGE_PLACEHOLDER)
    if num_placeholders != len(images):
        detail = f"the question has {num_placeholders} {IMAGE_PLACEHOLDER} and `image` names {len(images)} pictures"
        raise Unusable("placeholder_mismatch", f"{detail}: write one {IMAGE_PLACEHOLDER} a picture")
    return Row(
        sample_id=_text(fields, "id") if "id" in fields else default_id,
        question=question,
        answer=answer,
        solution=_text(fields, "solution") if "solution" in fields else rf"\boxed{{{answer}}}",
        images=images,
        metadata=metadata,
    )


def _text(fields: Mapping[str, Any], key: str) -> str:
    if key not in fields or fields[key] is None or fields[key] == "":
        raise Unusable(f"missing_{key}", f"the row has no `{key}`: add it")
    if not isinstance(fields[key], str):
        raise Unusable(f"bad_{key}", f"`{key}` is a JSON {type(fields[key]).__name__}: write a text or a number")
    return fields[key]


def _image_names(fields: Mapping[str, Any]) -> list[str]:
    if "image" not in fields or fields["image"] is None:
        return []
    names = fields["image"] if isinstance(fields["image"], list) else [fields["image"]]
    if not all(isinstance(name, str) for name in names):
        raise Unusable("bad_image", f"`image` is {fields['image']!r}: write one path or a list of paths")
    return names


def picture_path(folder: Path, name: str) -> Path:
    """The absolute path of a picture that exists below `folder` (itself resolved), symbolic links followed."""
    try:
        path = (folder / name).resolve()
        leaves_folder = Path(name).is_absolute() or not path.is_relative_to(folder)
        is_file = not leaves_folder and path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # too long a name, a loop of links, a NUL character
        raise Unusable("missing_file", f"the path {name!r} is unusable ({error}): fix `image`") from error
    if leaves_folder:
        raise Unusable("outside_folder", f"{name!r} leads out of the data folder: use a path below it, relative to it")
    if not is_file:
        raise Unusable("missing_file", f"there is no file {path}: add it, or fix `image`")
    return path

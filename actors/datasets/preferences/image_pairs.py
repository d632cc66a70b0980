"""Pairs of images for preference optimisation of flow models, one JSON object a line of `<folder>/<split>.jsonl`:

    {"id": "12", "prompt": "write 42", "chosen": "images/12a.png", "rejected": "images/12b.png"}

A path is relative to the folder and may not leave it. It names an image, or latents as a NumPy file (`.npy`). A line
that cannot be used is skipped and named; only a split without any usable row is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mobula.actors.datasets.formats.base import present
from mobula.actors.datasets.images import path_below
from mobula.actors.datasets.readers.base import refuse_unread
from mobula.actors.datasets.readers.json_files import read_objects
from mobula.actors.datasets.rows import RowError, Skipped, Split, first_few
from mobula.cluster.errors import DatasetError
from mobula.configs.near_paths import near


@dataclass(frozen=True)
class ImagePair:
    """One row: what was asked, and two files, the better image first."""

    sample_id: str
    question: str
    chosen: Path
    rejected: Path


def read_image_pairs(folder: Path, split: str) -> Split[ImagePair]:
    """The rows of a split, in order.

    Raises:
        DatasetError: there is no such file, or no line of it is usable.
    """
    file = folder / f"{split}.jsonl"
    if not file.is_file():
        refuse_unread(folder, split)
        raise DatasetError(f"{file} does not exist: set data.path to a folder that holds {split}.jsonl{near(file)}")
    rows: dict[str, ImagePair] = {}
    skipped: list[Skipped] = []
    for number, fields in read_objects(file):
        name = f"{split}-{number}"
        try:
            if isinstance(fields, RowError):
                raise fields
            name = present(fields, "id") or name
            if name in rows:
                raise RowError("duplicate_id", f"another row before it has the id {name!r}")
            rows[name] = _pair(fields, folder.resolve(), name)
        except RowError as why:
            skipped.append(Skipped(f"{file.name}:{number} ({name})", why.reason, why.detail))
    if not rows:
        raise DatasetError(f"{file} has no usable row{first_few(skipped)}: fill it, or set data.path to another folder")
    return Split(split, tuple(rows.values()), tuple(skipped))


def _pair(fields: Mapping[str, Any], folder: Path, name: str) -> ImagePair:
    prompt = fields.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        raise RowError("missing_prompt", f"`prompt` is {prompt!r}: write what the images should show")
    chosen, rejected = (_file(fields, key, folder) for key in ("chosen", "rejected"))
    if chosen == rejected:
        raise RowError("same_image", f"`chosen` and `rejected` are both {chosen.name}: a pair has two")
    return ImagePair(name, prompt, chosen, rejected)


def _file(fields: Mapping[str, Any], key: str, folder: Path) -> Path:
    value = fields.get(key)
    if not isinstance(value, str) or not value:
        raise RowError("missing_image", f"`{key}` is {value!r}: write the path of an image, or of latents")
    path = path_below(folder, value)
    if path is None:
        raise RowError(
            "outside_folder", f"`{key}` is {value!r}, which leads out of the data folder: use a path below it"
        )
    if not path.is_file():
        raise RowError("missing_file", f"there is no file {path}: add it, or fix `{key}`")
    return path

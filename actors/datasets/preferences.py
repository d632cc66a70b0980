"""Preference pairs of images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mobula.actors.datasets.formats.fields import SHARED_COLUMNS, unread_fields, without
from mobula.actors.datasets.images import path_below
from mobula.actors.datasets.open_split import read_split
from mobula.actors.datasets.rows import RowError, Split

# Reads image pairs for preference optimisation of flow models, one JSON object a line of `<folder>/<split>.jsonl`:
#
#     {"id": "12", "prompt": "write 42", "chosen": "images/12a.png", "rejected": "images/12b.png"}
#
# A path is relative to the folder and may not leave it. It names an image, or latents in a NumPy file (`.npy`).
# Unusable
# lines are skipped and reported; a split without usable lines is an error.


@dataclass(frozen=True)
class ImagePair:
    """One row: a prompt, and the files of the preferred and the rejected image (or latents)."""

    sample_id: str
    question: str
    chosen: Path
    rejected: Path
    unread: tuple[str, ...] = ()


def read_image_pairs(folder: Path, split: str, ignored: Sequence[str] = ()) -> Split[ImagePair]:
    """Reads the rows of a split, in order; `ignored` is `data.ignored_fields`."""
    return read_split(folder, split, "data.path", partial(_pair, folder.resolve(), ignored))


def _pair(folder: Path, ignored: Sequence[str], fields: Mapping[str, Any], name: str) -> ImagePair:
    fields = without(fields, ignored)
    unread = unread_fields(fields, ("id", "prompt", "chosen", "rejected"), has_answers=True)
    if shared := next((column for column in SHARED_COLUMNS if fields.get(column)), None):
        raise RowError("unread_field", f"the row has `{shared}`, and the text of a flow model is its prompt: remove it")
    prompt = fields.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        raise RowError("missing_prompt", f"`prompt` is {prompt!r}: write what the images should show")
    chosen, rejected = (_file(fields, key, folder) for key in ("chosen", "rejected"))
    if chosen == rejected:
        raise RowError("same_image", f"`chosen` and `rejected` are both {chosen.name}: a pair has two")
    return ImagePair(name, prompt, chosen, rejected, unread)


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

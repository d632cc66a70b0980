"""The pictures of a record: what it names them by, and the files behind the names."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from cluster.errors import RewardError

PROMPT_KEYS = ("image", "images")
RESPONSE_KEYS = ("response_image", "response_images")
MAX_BYTES = 64 << 20  # of one file
NUM_AT_HAND = 64  # files that one process keeps: the responses to one prompt follow each other
_URL = "data:"

Named = str | bytes
"""A path, a data URL, or the file itself as Parquet holds it."""


def named_pictures(values: Mapping[str, Any], keys: Sequence[str]) -> tuple[Named, ...]:
    """The pictures that a record names under `keys`, one or a list; what is none is kept as its text, to be named."""
    found: list[Named] = []
    for value in (values.get(key) for key in keys):
        found += [_named(item) for item in (value if isinstance(value, list | tuple) else [value]) if item is not None]
    return tuple(found)


def _named(value: Any) -> Named:
    if isinstance(value, Mapping):  # as data sets keep pictures in Parquet
        value = value.get("bytes") or value.get("path") or value.get("source")
    return value if isinstance(value, str | bytes) else str(value)


class PictureFiles:
    """Reads named pictures; paths that are not absolute begin in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read = lru_cache(maxsize=NUM_AT_HAND)(self._read_file)

    def read(self, named: Sequence[Named]) -> tuple[bytes, ...]:
        """The files, in order.

        Raises:
            RewardError: one cannot be read, is too large, or a data URL holds none.
        """
        return tuple(name if isinstance(name, bytes) else self._content(name) for name in named)

    def _content(self, name: str) -> bytes:
        return _decoded(name) if name.startswith(_URL) else self._read(name)

    def _read_file(self, name: str) -> bytes:
        path = self._folder / name
        try:
            with path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise RewardError(f"picture {path} cannot be read ({reason})") from error
        if len(content) > MAX_BYTES:
            raise RewardError(f"picture {path} has more than {MAX_BYTES:,} bytes")
        return content


def _decoded(url: str) -> bytes:
    head, comma, data = url.partition(",")
    try:
        if comma and head.endswith(";base64"):
            return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RewardError(f"picture {url[:40]!r}... is no base64 ({error})") from error
    raise RewardError(f"picture {url[:40]!r}... is no data URL of base64")

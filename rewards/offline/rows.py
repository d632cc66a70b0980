"""Rows of `mobula score`: sources, images and references."""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from mobula.cluster.errors import MobulaError, PreflightError, RewardError
from mobula.cluster.records.json_lines import check_encoding, parse_json
from mobula.cluster.records.trajectory import Response
from mobula.rewards.contract import RewardRequest

VIDEO_KEYS = ("video", "videos")
FRAME_KEYS = ("frames", "video")  # of the frames in a mapping
FRAME_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
MAX_BYTES = 64 << 20  # of one file
MAX_CACHED = 64  # files of one process: responses to one prompt are consecutive
_URL = "data:"
VIDEO = "video"


@dataclass(frozen=True)
class VideoFileName:
    """A video in one file; the frames that a run would show are unknown here."""

    name: str


Named = str | bytes | VideoFileName
"""A path, a data URL, the bytes of a file, or a video file."""


def named_frames(values: Mapping[str, Any]) -> tuple[Named, ...]:
    """Returns the frames of the videos of a record: each video is a list of images, or a mapping with a list."""
    frames: list[Named] = []
    for value in (values.get(key) for key in VIDEO_KEYS):
        videos = value if isinstance(value, list | tuple) and not _are_frames(value) else [value]
        for video in videos:
            frames += _frames(video)
    return tuple(frames)


def _frames(video: Any) -> Sequence[Named]:
    if video is None:
        return ()
    if isinstance(video, Mapping):
        held = next((video[key] for key in FRAME_KEYS if video.get(key) is not None), None)
        if held is not None:
            return _frames(held)
    if isinstance(video, list | tuple) and _are_frames(video):
        return [_named(frame) for frame in video]
    named = video.get("path") or video.get("source") or "held in the record" if isinstance(video, Mapping) else video
    return [VideoFileName(named if isinstance(named, str) else "held in the record")]


def _are_frames(items: Sequence[Any]) -> bool:
    return bool(items) and all(_is_frame(item) for item in items)


def _is_frame(item: Any) -> bool:
    if isinstance(item, Mapping):
        return not any(key in item for key in FRAME_KEYS) and (
            isinstance(item.get("bytes"), bytes) or _is_frame(item.get("path"))
        )
    return isinstance(item, bytes) or (
        isinstance(item, str) and (item.startswith("data:image/") or item.lower().endswith(FRAME_SUFFIXES))
    )


def named_images(values: Mapping[str, Any], *keys: str) -> tuple[Named, ...]:
    """Returns the images of a record under `keys`, one or a list. Other values are kept as text, for the error."""
    named: list[Named] = []
    for value in (values.get(key) for key in keys):
        items = value if isinstance(value, list | tuple) else [value]
        for item in items:
            is_audio = isinstance(item, Mapping) and item.get("modality") == "audio"  # in a recorded trajectory
            if item is not None and not is_audio:
                named.append(_named(item))
    return tuple(named)


def _named(value: Any) -> Named:
    if isinstance(value, Mapping):  # an image in Parquet
        if value.get("modality") == VIDEO:  # in a recorded trajectory
            return VideoFileName(str(value.get("source")))
        value = value.get("bytes") or value.get("path") or value.get("source")
    return value if isinstance(value, str | bytes) else str(value)


class ImageFiles:
    """Reads image files; relative paths start in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read = lru_cache(maxsize=MAX_CACHED)(self._read_file)

    def read(self, named: Sequence[Named]) -> tuple[bytes, ...]:
        for name in named:
            if isinstance(name, VideoFileName):
                raise RewardError(
                    f"the video {name.name[:200]!r} is one file, and which of its frames were shown is not known: "
                    'name its frames, "videos": [["0.png", "1.png"]]'
                )
        return tuple(name if isinstance(name, bytes) else self._content(str(name)) for name in named)

    def _content(self, name: str) -> bytes:
        return _decoded(name) if name.startswith(_URL) else self._read(name)

    def _read_file(self, name: str) -> bytes:
        path = self._folder / name
        try:
            with path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise RewardError(f"image {path} cannot be read ({reason})") from error
        if len(content) > MAX_BYTES:
            raise RewardError(f"image {path} has more than {MAX_BYTES:,} bytes")
        return content


def _decoded(url: str) -> bytes:
    head, comma, data = url.partition(",")
    try:
        if comma and head.endswith(";base64"):
            return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RewardError(f"image {url[:40]!r}... is no base64 ({error})") from error
    raise RewardError(f"image {url[:40]!r}... is no data URL of base64")


BATCH_BYTES = 4 << 20  # of one batch; a larger row is a batch alone
BUFFER_BYTES = 1 << 20  # of a Parquet column read at a time
TRAJECTORIES_FOLDER = "trajectories"  # in a run folder
COLUMNS = ("id", "prompt", "response", "reference", "metadata")
IMAGE_COLUMNS = ("image", "images", "video", "videos", "response_image", "response_images")

# of cluster.records.arrow.SCHEMA: column -> field of a row
TRAJECTORY_COLUMNS = {
    "trajectory_id": "id",
    "prompt_text": "prompt",
    "response_text": "response",
    "references": "reference",
    "metadata": "metadata",
    "response_num_tokens": "generated_tokens",
    "response_is_truncated": "is_truncated",
    "media": "images",
}

Row = bytes | Mapping[str, Any]
"""A line of JSON, or the values of a Parquet row."""


@dataclass(frozen=True)
class Batch:
    """Consecutive rows; `first` is the 1-based number of the first row. `size` is in units of the source."""

    first: int
    rows: Sequence[Row]
    size: int


@dataclass(frozen=True)
class Source:
    """A sequence of rows, read once. `size` is the total: bytes of JSONL, rows of Parquet."""

    path: Path
    kind: str
    size: int
    rows: Callable[[], Iterator[tuple[Row, int, int]]]
    """Yields (row, size, approximate bytes)."""

    def batches(self, num_rows: Callable[[], int]) -> Iterator[Batch]:
        """Yields batches of `num_rows()` rows, or fewer if the rows are large; `num_rows` is called for each batch."""
        batch: list[Row] = []
        first, size, num_bytes, most = 1, 0, 0, num_rows()
        for row, row_size, row_bytes in self.rows():
            if batch and (len(batch) >= most or num_bytes + row_bytes > BATCH_BYTES):
                yield Batch(first, batch, size)
                first, batch, size, num_bytes, most = first + len(batch), [], 0, 0, num_rows()
            batch.append(row)
            size += row_size
            num_bytes += row_bytes
        if batch:
            yield Batch(first, batch, size)


def open_source(path: Path, *, needs_images: bool) -> Source:
    """Opens a file or folder by its kind. Images in Parquet are read only with `needs_images`."""
    try:
        if path.is_dir() or path.suffix == ".parquet":
            return _parquet(path, needs_images)
        if path.is_file():  # a pipe can be read only once
            check_encoding(path)
        return Source(path, "jsonl", path.stat().st_size, lambda: _lines(path))
    except ValueError as error:
        raise PreflightError(str(error)) from error
    except OSError as error:
        kinds = "a JSONL or Parquet file, or a run folder"
        raise PreflightError(f"{path} cannot be read ({error.strerror or error}): give {kinds}") from error


def _lines(path: Path) -> Iterator[tuple[Row, int, int]]:
    with path.open("rb") as file:
        for line in file:
            size, rows = len(line), _predictions(line)
            responses: list[Row] = [*rows] or [line]
            for row in responses:
                yield row, size // max(1, len(rows)), size


def _predictions(line: bytes) -> list[dict[str, Any]]:
    """Returns a row for each response of a line that `evaluation.save_responses` wrote; none for another line."""
    if b'"predictions"' not in line or b'"response"' in line:
        return []
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return []  # `read_row` names the fault
    texts = row.get("predictions") if isinstance(row, dict) else None
    if not isinstance(texts, list):
        return []
    shared = {"prompt": row.get("prompt"), "reference": row.get("references"), "metadata": row.get("metadata")}
    lists = {name: row.get(name) for name in ("generated_tokens", "is_truncated")}
    columns = {name: values for name, values in lists.items() if isinstance(values, list) and len(values) == len(texts)}
    return [
        {"id": f"{row.get('id')}#{n}", "response": text, **shared}
        | {name: values[n] for name, values in columns.items() if values[n] is not None}
        for n, text in enumerate(texts)
    ]


def _parquet(path: Path, needs_images: bool) -> Source:
    import pyarrow as pa  # JSONL does not need it
    import pyarrow.parquet as pq

    files, kind = [path], "parquet"
    if path.is_dir():
        folder = path / TRAJECTORIES_FOLDER if (path / TRAJECTORIES_FOLDER).is_dir() else path
        files, kind = sorted(folder.glob("step-*.parquet")), "trajectories"
        if not files:
            reason = "give a run that had replay.trajectory_log=true, or a file below evaluations/ of a run"
            raise PreflightError(f"{path} holds no recorded trajectories: {reason}")
    names: dict[Path, dict[str, str]] = {}
    size = 0
    for file in files:
        try:
            with pq.ParquetFile(file) as opened:
                names[file] = _columns(file, opened.schema_arrow.names, needs_images)
                size += opened.metadata.num_rows
        except pa.ArrowInvalid as error:
            raise PreflightError(f"{file} is no Parquet file ({error}): write it again") from error

    def rows() -> Iterator[tuple[Row, int, int]]:
        for file, columns in names.items():
            with pq.ParquetFile(file, buffer_size=BUFFER_BYTES, pre_buffer=False) as opened:
                whole = max(1, opened.metadata.num_rows)
                groups = map(opened.metadata.row_group, range(opened.num_row_groups))
                row_bytes = sum(group.total_byte_size for group in groups) // whole
                most = max(1, min(1024, BATCH_BYTES // max(1, row_bytes)))
                for batch in opened.iter_batches(most, columns=list(columns)):
                    for row in batch.rename_columns([columns[name] for name in batch.schema.names]).to_pylist():
                        yield row, 1, row_bytes

    return Source(path, kind, size, rows)


def _columns(file: Path, names: Sequence[str], needs_images: bool) -> dict[str, str]:
    """Returns column -> field of a row, for the columns to read."""
    own = {name: name for name in (*COLUMNS, *IMAGE_COLUMNS) if name in names}
    columns = {n: TRAJECTORY_COLUMNS[n] for n in names if n in TRAJECTORY_COLUMNS} if "response_text" in names else own
    if "response" not in columns.values():
        raise PreflightError(f"{file} has no column `response`, only {', '.join(sorted(names))}: name one so")
    return {name: field for name, field in columns.items() if needs_images or field not in IMAGE_COLUMNS[:4]}


_decode = msgspec.json.Decoder().decode
ReadImages = Callable[[Sequence[Any]], tuple[bytes, ...]]


class BrokenRowError(MobulaError):
    """A row is not a valid record; the message names the fault."""


@dataclass(frozen=True, slots=True)
class Record:
    """A recorded response; `images` and `response_images` are names of files, not read yet."""

    id: str | int | None
    text: str
    references: tuple[str, ...]
    metadata: Mapping[str, Any]
    prompt: str
    images: tuple[Any, ...]
    response_images: tuple[Any, ...]

    @property
    def has_token_count(self) -> bool:
        return self.metadata.get("generated_tokens") is not None

    def request(self, read: ReadImages, *, needs_images: bool) -> RewardRequest:
        """Builds the request. Raises `RewardError` if an image cannot be read."""
        num_tokens = int(self.metadata["generated_tokens"]) if self.has_token_count else len(self.text.split())
        drawn = read(self.response_images) if self.response_images else ()
        response = Response(self.text, num_tokens, bool(self.metadata.get("is_truncated", False)), drawn)
        shown = read(self.images) if needs_images and self.images else ()
        return RewardRequest(response, self.references, self.metadata, self.prompt, shown)


def read_row(row: Row) -> Record:
    """Reads a row with `response` and optionally `id`, `prompt`, `reference`, `metadata` and images. A number may
    replace a text, a text a list, chat messages a prompt, and JSON text the metadata."""
    values = _parsed_line(row) if isinstance(row, bytes) else row
    if not isinstance(values, dict):
        raise BrokenRowError(f"a {type(values).__name__}, not an object")
    response = values.get("response")
    if response is None or response != response:
        raise BrokenRowError("it has no response")
    id_ = values.get("id")
    has_images = not values.keys().isdisjoint(IMAGE_COLUMNS)
    return Record(
        id=id_ if id_ is None or type(id_) in (int, str) else str(id_),
        text=_text(response, "response"),
        references=_references(values.get("reference")),
        metadata=_metadata(values),
        prompt=_prompt(values.get("prompt")),
        images=(*named_images(values, "image", "images"), *named_frames(values)) if has_images else (),
        response_images=named_images(values, "response_image", "response_images") if has_images else (),
    )


def _parsed_line(line: bytes) -> Any:
    # msgspec takes the last of equal keys; parse_json refuses them
    if line.count(b'"response"') < 2 and line.count(b'"reference"') < 2:
        try:
            return _decode(line)
        except (msgspec.MsgspecError, RecursionError, UnicodeError):
            pass  # parse_json is slower and accepts more, and its errors name the fault
    try:
        return parse_json(line)
    except ValueError as error:
        raise BrokenRowError(f"no JSON ({error})") from error


def _text(value: Any, name: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise BrokenRowError(f"{name} is {_kind(value)}, not a text")
    return str(value)


def _references(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = value.strip()
        return (value,) if value else ()
    if value is None or value != value:
        return ()
    items = value if isinstance(value, list | tuple) else [value]
    texts = (_text(item, "reference").strip() for item in items if item is not None and item == item)
    return tuple(filter(None, texts))


def _metadata(values: Mapping[str, Any]) -> Mapping[str, Any]:
    metadata = values.get("metadata") or {}
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except (ValueError, RecursionError) as error:
            raise BrokenRowError(f"metadata is a text and no JSON ({error})") from error
    if not isinstance(metadata, dict):
        raise BrokenRowError(f"metadata is a {type(metadata).__name__}, not an object")
    for name in ("generated_tokens", "is_truncated"):  # columns of recorded trajectories
        if name in values:
            metadata = {name: values[name], **metadata}
    tokens = metadata.get("generated_tokens")
    if tokens is not None and (not isinstance(tokens, int | float) or not math.isfinite(tokens)):
        raise BrokenRowError(f"generated_tokens is {tokens!r:.40}, no number")
    return metadata


def _prompt(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list | tuple) and all(isinstance(message, dict) for message in value):
        contents = [message.get("content") for message in value]
        parts = [part for content in contents for part in (content if isinstance(content, list) else [content])]
        texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
        return "\n".join(text for text in texts if isinstance(text, str))
    return _text(value, "prompt")


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    return f"{value}".lower() if isinstance(value, bool) else f"a {type(value).__name__}"

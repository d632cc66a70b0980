"""Reads files record by record: JSON, lists of prompts, and WebDataset shards; only positions are in memory."""

from __future__ import annotations

import mmap
import os
import re
import tarfile
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from mobula.actors.datasets.media import EncodedFile
from mobula.actors.datasets.rows import RowError
from mobula.cluster.errors import DatasetError, SplitNotFoundError
from mobula.cluster.records.json_lines import line_positions, parse_json, read_lines, refuse_compressed
from mobula.configs.near_paths import near

Record = Mapping[str, Any]
T = TypeVar("T")
SUFFIXES = {  # kind of data -> suffixes of files, by priority
    "jsonl": (".jsonl",),
    "prompts": (".jsonl", ".txt"),
    "json": (".json", ".jsonl"),
    "parquet": (".parquet",),
    "webdataset": (".tar",),
}
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")
TABLES = (".csv", ".tsv")


class Table(Protocol):
    """Records in the order of the files. Thread-safe."""

    @property
    def blocks(self) -> np.ndarray:
        """int64 [num_blocks, 2]: number of records of each block, and bytes in memory while a record of it is read; 0
        bytes if records are read one by one."""

    @property
    def root(self) -> Path:
        """The folder that paths of media are relative to."""

    @property
    def source(self) -> str:
        """The first file, or the name of the dataset, for error messages."""

    def __len__(self) -> int: ...

    def record(self, index: int) -> Record:
        """Raises: RowError: the record cannot be read."""

    def name(self, index: int) -> str:
        """The file and the number in the file, e.g. `train.jsonl:12`."""


@dataclass(frozen=True)
class Opened:
    """Input of a reader: the location of the data, and its options."""

    path: Path  # a folder, or a hub name
    split: str  # name in the data
    cache: Path  # folder of files for later runs
    max_block_bytes: int  # larger blocks are not read into memory
    subset: str  # configuration of a dataset with several; else empty
    num_streamed: int  # records to stream from the hub; 0 downloads all


Reader = Callable[[Opened], Table]
"""Raises: DatasetError: there is no such split, or the files cannot be read."""


def files_of(opened: Opened, suffixes: Sequence[str]) -> list[Path]:
    """The files of a split, sorted by name: `SPLIT.EXT`, `SPLIT-*.EXT` or `SPLIT/*.EXT` in the folder or in `data/`. A
    split name with a wildcard or a dot is a pattern of file names. Raises: DatasetError: there are none."""
    folder, split = opened.path, opened.split
    if folder.is_file():
        raise DatasetError(
            f"data.path={folder} is a file: name its folder, and its files as data.splits={{{split}: {folder.name}}}"
        )
    is_pattern = any(character in split for character in "*?[.")
    for suffix in suffixes:
        names = [split] if is_pattern else [f"{split}{suffix}", f"{split}-*{suffix}", f"{split}/*{suffix}"]
        for below in (folder, folder / "data"):
            for name in names:
                if files := sorted(path for path in below.glob(name) if path.is_file()):
                    return files
    wanted = split if is_pattern else f"{split}{suffixes[0]}"
    refuse_unread(folder, split)
    raise SplitNotFoundError(
        f"{folder / wanted} does not exist: set data.path to a folder that holds {wanted}, or name the files of the "
        f"split in data.splits{near(folder / wanted)}"
    )


def refuse_unread(folder: Path, split: str) -> None:
    """Raises: DatasetError: the split exists in an unsupported file format."""
    for path in sorted((*folder.glob(f"{split}*"), *(folder / "data").glob(f"{split}*"))):
        if path.suffix in COMPRESSED:
            raise DatasetError(f"{path} is compressed: unpack it")
        if path.suffix in TABLES:
            raise DatasetError(f"{path} has no types: set data.kind=huggingface, or convert it to Parquet")


def without_nulls(value: Any) -> Any:
    """Removes missing fields recursively: columnar files have every field in every record. Null, NaN, and the missing
    values of NumPy and pandas are removed; an item of a list becomes None."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if not is_missing(item)}
    if isinstance(value, list | tuple):
        return [None if is_missing(item) else without_nulls(item) for item in value]
    return value


def is_missing(value: Any) -> bool:
    """Whether a value is null or NaN of any library: None, NaN, NaT or NA."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    if isinstance(value, Decimal):
        return value.is_nan()
    return isinstance(value, float | np.floating | np.datetime64 | np.timedelta64) and bool(value != value)


def read_one_by_one(num_records: int) -> np.ndarray:
    """The `blocks` of a table with records that are read one by one."""
    return np.array([[num_records, 0]], dtype=np.int64)


def located(ends: np.ndarray, index: int) -> tuple[int, int]:
    """The part with a record, and the record's index in it. `ends`, int64 [N]: records up to the end of each part."""
    part = int(np.searchsorted(ends, index, side="right"))
    return part, index - (int(ends[part - 1]) if part else 0)


class OpenFiles:
    """Files that are read at any offset, and closed with this object. Thread-safe."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._descriptors: list[int] = []
        for file in files:
            self._descriptors.append(os.open(file, os.O_RDONLY))

    def __del__(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)

    def read(self, file: int, start: int, length: int) -> bytes:
        return os.pread(self._descriptors[file], length, start)


class BlockCache(Generic[T]):
    """An LRU cache of blocks with at most `max_bytes`, but at least one block. Not thread-safe."""

    def __init__(self, load: Callable[[int], tuple[T, int]], max_bytes: int) -> None:
        self._load = load
        self._max_bytes = max_bytes
        self._blocks: OrderedDict[int, tuple[T, int]] = OrderedDict()
        self._num_bytes = 0

    def get(self, block: int) -> T:
        if block not in self._blocks:
            self._blocks[block] = self._load(block)
            self._num_bytes += self._blocks[block][1]
            while self._num_bytes > self._max_bytes and len(self._blocks) > 1:
                _, (_, freed) = self._blocks.popitem(last=False)
                self._num_bytes -= freed
        self._blocks.move_to_end(block)
        return self._blocks[block][0]


def parse_object(text: bytes, what: str) -> Record:
    try:
        record: Any = parse_json(text)
    except ValueError as error:
        raise RowError("broken_json", f"the {what} is not JSON ({error}): fix or delete it") from error
    if not isinstance(record, dict):
        as_array = what == "line" and isinstance(record, list)
        hint = (
            ", or name the file .json for data.kind=json (`mobula data convert` for offline jobs)" if as_array else ""
        )
        raise RowError("broken_json", f"the {what} is a JSON {type(record).__name__}: write an object{hint}")
    return record


class LineTable:
    """Implements `Table` for JSON objects, one a line, of several files; only offsets are in memory, 20 bytes a
    record."""

    what = "line"  # name of a record in errors

    def __init__(self, root: Path, files: list[Path]) -> None:
        self.root = root
        self.source = str(files[0])
        self._files = files
        self._starts, self._lengths, self._numbers = array("q"), array("q"), array("I")
        ends = []
        for file in files:
            try:
                for start, length, number in self.spans(file):
                    self._starts.append(start)
                    self._lengths.append(length)
                    self._numbers.append(number)
            except ValueError as error:
                raise DatasetError(str(error)) from error
            ends.append(len(self._starts))
        self._ends = np.array(ends)  # int64 [files]: records up to the end of each file
        self._opened = OpenFiles(files)
        self.blocks = read_one_by_one(len(self))

    def __len__(self) -> int:
        return len(self._starts)

    def record(self, index: int) -> Record:
        file, _ = located(self._ends, index)
        return self.parsed(self._opened.read(file, self._starts[index], self._lengths[index]))

    def name(self, index: int) -> str:
        file, _ = located(self._ends, index)
        return f"{self._files[file].name}:{self._numbers[index]}"

    def spans(self, file: Path) -> Iterable[tuple[int, int, int]]:
        """(start, length, number in the file) of every record."""
        return line_positions(file)

    def parsed(self, text: bytes) -> Record:
        return parse_object(text, self.what)


def open_jsonl(opened: Opened) -> Table:
    return LineTable(opened.path, files_of(opened, SUFFIXES["jsonl"]))


def read_objects(file: Path) -> Iterator[tuple[int, Record | RowError]]:
    """Yields number (from 1) and object of every line that is not empty, without missing values; for an invalid line,
    the error instead of the object."""
    try:
        for number, line in read_lines(file):
            try:
                yield number, without_nulls(parse_object(line, "line"))
            except RowError as error:
                yield number, error
    except ValueError as error:
        raise DatasetError(str(error)) from error


# A string, or a structural character of JSON. Possessive quantifiers: no backtracking in long strings.
TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{},]', re.DOTALL)
OPENING, CLOSING = (b"[", b"{"), (b"]", b"}")
ANYTHING = re.compile(rb"\S")


def open_json(opened: Opened) -> Table:
    files = files_of(opened, SUFFIXES["json"])
    return (ArrayTable if all(map(_is_array, files)) else LineTable)(opened.path, files)


class ArrayTable(LineTable):
    """Elements of arrays as records."""

    what = "element"

    def spans(self, file: Path) -> Iterable[tuple[int, int, int]]:
        return _elements(file)


def _is_array(file: Path) -> bool:
    with file.open("rb") as content:
        return content.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def _elements(file: Path) -> Iterator[tuple[int, int, int]]:
    """Yields start, length and number (from 1) of every element of an array, without parsing it into memory."""
    with file.open("rb") as content, mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ) as text:
        depth, start, number = 0, 0, 0
        for token in TOKEN.finditer(text):
            symbol = token[0]
            if symbol in OPENING:
                depth += 1
                if depth == 1:
                    start = token.end()
            elif depth == 1 and symbol in (b",", b"]"):
                if text[start : token.start()].strip():
                    number += 1
                    yield start, token.start() - start, number
                start = token.end()
                depth -= symbol == b"]"
            elif symbol in CLOSING:
                depth -= 1
            if depth == 0:
                if ANYTHING.search(text, token.end()):
                    raise DatasetError(f"{file} goes on behind its array: write one array, or one object a line")
                return
    raise DatasetError(f"{file} is an array that does not end: write it again, or one object a line")


TEXT = ".txt"


def open_prompts(opened: Opened) -> Table:
    """Opens the JSONL files of a split; without any, the text files."""
    files = files_of(opened, SUFFIXES["prompts"])
    return (TextTable if files[0].suffix == TEXT else LineTable)(opened.path, files)


class TextTable(LineTable):
    """Lines of text as records with one column, `prompt`."""

    def parsed(self, text: bytes) -> Record:
        try:
            return {"prompt": text.decode("utf-8-sig").strip()}
        except UnicodeDecodeError as error:
            raise RowError("broken_text", f"the line is not UTF-8 ({error}): convert the file") from error


MEMBERS = {  # column -> extensions of media in a shard
    "videos": ("mp4", "mkv", "avi", "mov", "webm", "mpeg", "mpg", "ogv", "flv"),
    "audios": ("wav", "flac", "mp3", "ogg", "aiff", "aif", "m4a", "mka", "aac"),
    "images": ("png", "jpg", "jpeg", "webp", "gif", "bmp", "tif", "tiff"),
}


def open_webdataset(opened: Opened) -> Table:
    """Raises: DatasetError: a shard is no tar file, is compressed, or is truncated."""
    return ShardTable(opened.path, files_of(opened, SUFFIXES["webdataset"]))


class ShardTable:
    """Implements `Table` for samples of tar files: adjacent members that share the name up to the first dot.

    `000012.json` is the record; `000012.png` (or `000012.0.jpg`, `000012.1.jpg`) are images in order; `000012.mp4` (or
    `000012.0.mp4`, ...) videos; `000012.wav` (or `000012.0.flac`, ...) sounds. A GIF is a video if the name has
    `video`, `000012.video.gif`. A text member such as `000012.question.txt` or `000012.answer` is the column
    `question.txt` or `answer`, without byte order mark and final line break.
    """

    def __init__(self, root: Path, files: list[Path]) -> None:
        self.root = root
        self.source = str(files[0])
        self._files = files
        self._extensions: list[str] = []
        # By member:
        self._starts = array("q")  # offset in the shard
        self._sizes = array("q")
        self._kinds = array("i")  # index of the extension in `_extensions`
        # By sample:
        self._first = array("q")  # first member
        self._shards = array("i")
        numbers: dict[str, int] = {}
        for shard, file in enumerate(files):
            try:
                refuse_compressed(file)
                self._index(shard, file, numbers)
            except ValueError as error:
                raise DatasetError(str(error)) from error
            except tarfile.TarError as error:
                raise DatasetError(
                    f"{file} is no uncompressed tar file ({error}): write it again, without compression"
                ) from error
        self._first.append(len(self._starts))
        self._extensions = list(numbers)
        self._opened = OpenFiles(files)
        self.blocks = read_one_by_one(len(self))

    def __len__(self) -> int:
        return len(self._shards)

    def record(self, index: int) -> Record:
        record: dict[str, object] = {}
        media: dict[str, list[EncodedFile]] = {"images": [], "videos": [], "audios": []}
        for member in range(self._first[index], self._first[index + 1]):
            extension = self._extensions[self._kinds[member]]
            last = extension.rpartition(".")[2].lower()
            content = self._opened.read(self._shards[index], self._starts[member], self._sizes[member])
            has_video = "video" in extension.lower().split(".")
            column = "videos" if has_video else next((name for name, kinds in MEMBERS.items() if last in kinds), "")
            if column:
                media[column].append(EncodedFile(content, f"{self.name(index)} .{extension}"))
            elif last == "json":
                record.update(parse_object(content, f".{extension} of the sample"))
            else:
                record[extension] = _text(content, extension)
        return {**record, **{column: files for column, files in media.items() if files}}

    def name(self, index: int) -> str:
        """The shard, and the number in the shard."""
        shard = self._shards[index]
        first = int(np.searchsorted(np.frombuffer(self._shards, dtype=np.int32), shard))
        return f"{self._files[shard].name}:{index - first + 1}"

    def _index(self, shard: int, file: Path, numbers: dict[str, int]) -> None:
        key = None
        with tarfile.open(file, "r:") as members:
            for member in members:
                members.members = []  # type: ignore[attr-defined]  # tarfile would keep every header in memory
                folder, _, name = member.name.rpartition("/")
                stem, dot, extension = name.partition(".")
                if not member.isfile() or not dot or not stem:
                    continue
                if (folder, stem) != key:
                    key = (folder, stem)
                    self._first.append(len(self._starts))
                    self._shards.append(shard)
                self._starts.append(member.offset_data)
                self._sizes.append(member.size)
                self._kinds.append(numbers.setdefault(extension, len(numbers)))
            end = members.offset
        with file.open("rb") as content:
            content.seek(end)
            if content.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError("unexpected end of data")


def _text(content: bytes, extension: str) -> str:
    try:
        return content.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise RowError(
            "bad_text", f"the member .{extension} is no text ({error}): remove it, or name it .json"
        ) from error

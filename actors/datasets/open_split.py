"""open_split: the rows of one split of the configured data, whatever files they lie in."""

from __future__ import annotations

from pathlib import Path

from mobula.actors.datasets.audios import AudioInputs
from mobula.actors.datasets.curricula import CURRICULA, Curriculum
from mobula.actors.datasets.downloads import DownloadLimits, LateDownloads, MediaDownloads
from mobula.actors.datasets.formats import FORMATS
from mobula.actors.datasets.lazy_rows import LazyRows
from mobula.actors.datasets.mixture import MixedRows
from mobula.actors.datasets.pictures import Downloads, PictureInputs
from mobula.actors.datasets.readers import READERS
from mobula.actors.datasets.readers.base import Opened
from mobula.actors.datasets.rows import Split
from mobula.actors.datasets.table_rows import TableRows
from mobula.actors.datasets.videos import VideoInputs
from mobula.cluster.errors import DatasetError
from mobula.configs.schema.data import WRITTEN, DataConfig, DataKind, SourceConfig


def open_split(data: DataConfig, split: str, label_key: str, *, fetches_late: bool = False) -> Split:
    """The rows of a split; nothing but an index of them is read. `label_key` is where metadata hold a row's label.

    Media of web URLs are downloaded when their row is asked; with `fetches_late` the row holds `WebFile`s, which the
    process that reads them downloads into its own `data.cache_path`.

    Raises:
        DatasetError: there is no such split, its files cannot be read, or it has no record.
    """
    if data.kind is not DataKind.MIXTURE:
        return Split(split, _open_source(data, data, data.path, split, label_key, fetches_late), ())
    parts = {
        name: _open_source(data, source, _path_of(data, source), split, label_key, fetches_late)
        for name, source in data.sources.items()
    }
    weights = {name: source.weight for name, source in data.sources.items()}
    mixed = MixedRows(parts, weights, by_rows=data.weight_by_rows, temperature=data.temperature)
    return Split(split, mixed, ())


def curriculum_of(data: DataConfig) -> Curriculum | None:
    """The curriculum of the training split, if there is one."""
    found = data.curriculum
    if found.kind == "none":
        return None
    return Curriculum(CURRICULA[found.kind], found.key, found.num_stages, found.num_epochs)


def _path_of(data: DataConfig, source: SourceConfig) -> Path:
    """Paths of sources begin in `data.path`; what is no folder there is a name on the hub."""
    path = data.path / source.path
    return source.path if source.kind is DataKind.HUGGINGFACE and not path.is_dir() else path


def _open_source(
    data: DataConfig, source: SourceConfig, path: Path, split: str, label_key: str, fetches_late: bool
) -> LazyRows:
    row_format = FORMATS[source.row_format]
    unknown = sorted(set(source.columns) - {*row_format.columns, label_key})
    if unknown:
        raise DatasetError(
            f"data.columns has {unknown[0]}, which is no column of data.row_format={source.row_format}: it has "
            f"{', '.join(row_format.columns)}"
        )
    kind = DataKind.JSONL if source.kind in WRITTEN else source.kind
    named = Opened(
        path,
        source.splits.get(split, split),
        cache=data.cache_path,
        max_block_bytes=data.shuffle_bytes,
        subset=source.subset,
        num_streamed=data.streamed_rows,
    )
    table = READERS[kind.value](named)
    if len(table) == 0:
        raise DatasetError(f"{table.source} has no usable row: fill it, or set data.path to another folder")
    root = data.path / source.media_path if source.media_path else table.root
    # paths that datasets found in a folder are absolute; they are confined to the folder as all others
    takes_absolute = source.media_path != "" or source.kind is DataKind.HUGGINGFACE

    def downloads(max_bytes: int, key: str) -> Downloads:
        limits = DownloadLimits(max_bytes, key, data.max_redirects, data.download_timeout_s)
        # absolute, because processes on other nodes have other working folders
        found = MediaDownloads((data.cache_path / "downloads").absolute(), data.allowed_hosts, limits)
        return LateDownloads(found) if fetches_late else found

    pictures = downloads(data.max_image_bytes, "data.max_image_bytes")
    videos = downloads(data.video.max_file_bytes, "data.video.max_file_bytes")
    sounds = downloads(data.audio.max_file_bytes, "data.audio.max_file_bytes")
    return TableRows(
        table,
        row_format,
        PictureInputs(root, pictures, takes_absolute=takes_absolute),
        VideoInputs(root, videos, takes_absolute=takes_absolute),
        AudioInputs(root, sounds, takes_absolute=takes_absolute),
        columns=source.columns,
        placeholders=data.placeholders.model_dump(),
        numbers_ids=data.repeated_ids == "number",
        label_key=label_key,
        label=source.label,
        window_bytes=data.shuffle_bytes,
        curriculum=curriculum_of(data),
    )

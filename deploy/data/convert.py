"""`mobula data convert`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

from PIL import Image
from rich.console import Console

from mobula.actors.datasets.clips import FrameList, Video
from mobula.actors.datasets.images import ImageSource
from mobula.actors.datasets.open_split import open_split
from mobula.actors.datasets.rows import Row, Skipped, count_by_reason
from mobula.actors.processors.audio import whole_audio
from mobula.actors.processors.image import decode_image, open_bounded, read_image
from mobula.actors.processors.video import decode_video, load_video
from mobula.cluster.errors import PreflightError, SkippedSample
from mobula.cluster.records.markup import BREAK, parts_of
from mobula.cluster.records.media import FORMATS
from mobula.configs.schema import DataConfig, RunConfig
from mobula.deploy.wiring.preparation import ensure_data

NUM_NAMED = 20
IMAGE_EXTENSIONS = {"JPEG": "jpg", "TIFF": "tif"}  # of the others it is their name
VIDEO_EXTENSIONS = (".mp4", ".mkv", ".avi", ".mov", ".webm", ".mpeg", ".mpg", ".ogv", ".flv", ".gif")
File = tuple[bytes, str]  # content and extension


def convert(config: RunConfig, output: Path, splits: Sequence[str], console: Console) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise PreflightError(f"{output} is there and not an empty folder: give another folder, or remove it first")
    ensure_data(config)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as staging:
            written = Path(staging) / "data"
            written.mkdir()
            for split in splits:
                with (written / f"{split}.jsonl").open("w", encoding="utf-8") as file:
                    num, skipped = _write(config, split, written, file)
                _report(console, f"{split}: {num:,} rows written", skipped)
            written.replace(output)  # whole or not at all; an empty folder is replaced
    except (OSError, ValueError) as error:
        raise PreflightError(f"{output} cannot be written: {error}") from error
    console.print(f"{output} is complete: read it with data=messages data.path={output}", soft_wrap=True)


def message_record(row: Row, media: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Returns a record of the format `messages` that reads back as `row`. Args: media: column -> media references."""
    turns = [
        {"role": turn.role, "content": _content(turn.text), **turn.fields, **({} if turn.in_loss else {"weight": 0})}
        for turn in row.history
    ]
    record: dict[str, Any] = {
        "id": row.sample_id,
        "messages": [*turns, {"role": "user", "content": _content(row.question)}],
        "answer": row.answer,
        "solution": row.solution,
        "chosen": row.chosen,
        "rejected": row.rejected,
        "metadata": row.metadata,
        **json.loads(row.template or "{}"),
        **media,
    }
    return {column: value for column, value in record.items() if value or column in ("answer", "solution")}


def _content(text: str) -> str | list[dict[str, str]]:
    return parts_of(text) if BREAK in text else text


def _write(config: RunConfig, split: str, folder: Path, file: TextIO) -> tuple[int, list[Skipped]]:
    rows = open_split(config.data, split, config.rewards.label_key).rows
    skipped: list[Skipped] = []
    most = config.data.max_skipped_fraction * len(rows)
    for index in range(len(rows)):
        sample = ""
        try:
            row = rows[index]
            sample = row.sample_id
            file.write(json.dumps(message_record(row, _stored_media(row, config.data, folder)), ensure_ascii=False))
            file.write("\n")
        except SkippedSample as error:
            skipped.append(Skipped.of(sample, error))
            if len(skipped) > most:
                raise PreflightError(
                    f"more than data.max_skipped_fraction={config.data.max_skipped_fraction:g} of the split {split} is "
                    f"unusable, at last {skipped[-1]}: fix the rows or raise it"
                ) from error
    return len(rows) - len(skipped), skipped


def _stored_media(row: Row, data: DataConfig, folder: Path) -> dict[str, list[Any]]:
    """Column -> paths of the row's media in `folder`. Nothing is stored unless all media of the row are usable."""
    images = [_image_file(image, data) for image in row.images]
    videos = [_video_files(video, data) for video in row.videos]
    audios = [whole_audio(sound, data.audio) for sound in row.audios]
    frames = [[_stored(folder, "videos", file) for file in files] for files in videos]
    return {
        "images": [_stored(folder, "images", file) for file in images],
        "videos": [_video_value(*video) for video in zip(row.videos, frames, strict=True)],
        "audios": [_stored(folder, "sounds", file) for file in audios],
    }


def _image_file(source: ImageSource, data: DataConfig) -> File:
    content = read_image(source, data)
    decode_image(content, source, data)
    with Image.open(BytesIO(content), formats=FORMATS) as image:
        kind = str(image.format)
    return content, IMAGE_EXTENSIONS.get(kind, kind.lower())


def _video_files(video: Video, data: DataConfig) -> list[File]:
    decode_video(load_video(video, data), data)
    if isinstance(video, FrameList):
        return [_image_file(frame, data) for frame in video.frames]
    with open_bounded(video, data.video.max_file_bytes, "data.video.max_file_bytes") as file:
        content = file.read()
    extension = Path(str(video)).suffix.lower()
    return [(content, (extension if extension in VIDEO_EXTENSIONS else ".mp4")[1:])]


def _video_value(video: Video, paths: list[str]) -> Any:
    if not isinstance(video, FrameList):
        return paths[0]
    return {"frames": paths} if video.frame_rate is None else {"frames": paths, "fps": video.frame_rate}


def _stored(folder: Path, kind: str, file: File) -> str:
    """The path of the file relative to the folder. It is named by its content, so that each is stored once."""
    content, extension = file
    name = f"{kind}/{hashlib.sha256(content).hexdigest()[:24]}.{extension}"
    path = folder / name
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    return name


def _report(console: Console, line: str, skipped: Sequence[Skipped]) -> None:
    reasons = ", ".join(f"{reason} {num:,}" for reason, num in count_by_reason(skipped).items())
    console.print(f"{line}; {f'skipped: {reasons}' if skipped else 'none skipped'}", soft_wrap=True)
    for sample in skipped[:NUM_NAMED]:
        console.print(f"  {sample}", soft_wrap=True)
    if len(skipped) > NUM_NAMED:
        console.print(f"  and {len(skipped) - NUM_NAMED:,} more")

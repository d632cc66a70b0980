"""`mobula data convert` and `mobula data inspect`."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from io import BytesIO
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

import numpy as np
from markupsafe import Markup
from PIL import Image
from rich.console import Console

from mobula.actors.datasets.media import Audio, FrameList, ImageSource, Video
from mobula.actors.datasets.open_split import open_split
from mobula.actors.datasets.prompts import RowChecker, checked_rows
from mobula.actors.datasets.rows import Row, Skipped, count_by_reason
from mobula.actors.processors.chat import ChatProcessor
from mobula.actors.processors.media import (
    AudioLimits,
    check_audio,
    check_image,
    check_video,
    decode_audio,
    decode_image,
    decode_video,
    draw_sound,
    load_audio,
    load_video,
    open_bounded,
    read_image,
    whole_audio,
)
from mobula.cluster.errors import MediaError, PreflightError, SkippedSample
from mobula.cluster.records.markup import BREAK, parts_of, plain
from mobula.cluster.records.media import FORMATS, MediaStore
from mobula.configs.schema import DataConfig, RunConfig
from mobula.deploy.pages.report import STYLE, environment, write_number
from mobula.deploy.preflight.rows import find_in_rows, row_notes
from mobula.deploy.wiring.preparation import ensure_data, ensure_model

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


ASSETS = Path(__file__).parent
AUDIO_RATE = 16_000  # that sounds are drawn at
NUM_BINS = 40
MAX_SKIPPED_ROWS = 200
MAX_LABELS = 30
THUMBNAIL_SIZE = (512, 256)
STRIP_FRAMES = 4  # of a video
UNKNOWN_MODEL = "???"


@dataclass
class SplitMeasurements:
    """Checks the rows of a split as a run does, and measures them."""

    checker: RowChecker[Row]
    config: RunConfig
    lengths: list[int] = field(default_factory=list)
    images: Counter[int] = field(default_factory=Counter)  # images of a row -> rows
    labels: Counter[str] = field(default_factory=Counter)
    num_videos: int = 0
    num_sounds: int = 0

    def check(self, row: Row) -> int:
        length = self.checker.check(row)
        self.lengths.append(length)
        self.images[len(row.images)] += 1
        self.num_videos += len(row.videos)
        self.num_sounds += len(row.audios)
        self.labels[self.config.rewards.label_of(row.metadata)] += 1
        return length


@dataclass(frozen=True)
class HeaderChecker:
    """Checks the headers of media where no model is named; a length is then in characters."""

    data: DataConfig
    audio: AudioLimits

    def check(self, row: Row) -> int:
        for image in row.images:
            check_image(image, self.data)
        for video in row.videos:
            check_video(video, self.data)
        for audio in row.audios:
            check_audio(audio, self.audio)
        return sum(len(turn.text) for turn in row.history) + len(row.question)


Bar = tuple[float, float, float, str]  # left, width and height in per cent, and text
ShownRow = tuple[Row, str, list[str]]  # label, and images as data URLs; empty texts for those that cannot be decoded


def inspect(config: RunConfig, split: str, output: Path, num_samples: int, console: Console) -> int:
    """Write the page of a split; returns the exit code."""
    ensure_data(config)
    opened = open_split(config.data, split, config.rewards.label_key)
    checker, unit = _checker(config)
    measured = SplitMeasurements(checker, config)
    checked = checked_rows(opened, measured, config.data.max_checked_rows, note=partial(row_notes, config))
    notes = [str(finding) for finding in find_in_rows(config, {split: checked.notes})]
    samples = _samples(checked.rows, config, min(num_samples, checked.num_usable), checked.num_usable)
    labels, skipped = measured.labels.most_common(), checked.skipped
    bars, ticks = histogram(measured.lengths)
    template = environment(ASSETS).get_template("inspect.html.j2")  # escapes all data, and no script runs
    page = template.render(
        name=f"{config.data.path} · {split}",
        facts=_facts(measured, skipped, len(opened.rows), unit),
        source=_source(config.data),
        unit=unit,
        bars=bars,
        ticks=ticks,
        labels=labels[:MAX_LABELS],
        num_labels=len(labels),
        images=sorted(measured.images.items()),
        reasons=sorted(checked.num_skipped.items(), key=lambda item: -item[1]),
        skipped=skipped[:MAX_SKIPPED_ROWS],
        num_skipped=len(skipped),
        notes=notes,
        samples=samples,
        style=Markup(STYLE.read_text(encoding="utf-8")),
    )
    try:
        output.write_text(page, encoding="utf-8", errors="replace")
    except OSError as error:
        raise PreflightError(f"{output} cannot be written ({error.strerror}): give another --output") from error
    console.print(
        f"{split}: {len(opened.rows):,} rows, {checked.num_usable:,} checked and usable, "
        f"{len(checked.skipped):,} skipped; page: {output}",
        soft_wrap=True,
    )
    for note in notes:
        console.print(note, soft_wrap=True)
    return 0


def histogram(lengths: Sequence[int]) -> tuple[list[Bar], list[tuple[float, str]]]:
    """Returns bars of equal width from the shortest to the longest, and the ticks below them."""
    if not lengths:
        return [], []
    low, high = min(lengths), max(lengths)
    counts, edges = np.histogram(lengths, bins=min(NUM_BINS, high - low + 1), range=(low, high + 1))
    width = 100 / len(counts)
    bars = [
        (width * index, width * 0.9, 100 * count / counts.max(), f"from {edges[index]:.0f}: {count:,} rows")
        for index, count in enumerate(counts.tolist())
    ]
    ticks = [(25.0 * quarter, write_number(round(low + (high + 1 - low) * quarter / 4))) for quarter in range(5)]
    return bars, ticks


def _checker(config: RunConfig) -> tuple[RowChecker[Row], str]:
    if config.policy.model == UNKNOWN_MODEL:
        return HeaderChecker(config.data, _audio_limits(config.data)), "characters"
    ensure_model(config)
    media = MediaStore(lambda value: value, config.data.media_cache_bytes)
    device, suffix = config.resources.device, config.question_suffix
    data, sampler = config.data, config.sampler
    chat = ChatProcessor(config.policy.model, data, sampler, media, keep_files=False, device=device, suffix=suffix)
    return chat, "tokens"


def _samples(rows: Sequence[Row], config: RunConfig, num: int, num_usable: int) -> list[ShownRow]:
    data, audio = config.data, _audio_limits(config.data)
    shown = []
    for position in range(num):
        row = rows[position * num_usable // num]
        images = [_thumbnail(partial(_image, image, data)) for image in row.images]
        images += [_thumbnail(partial(_strip, video, data)) for video in row.videos]
        images += [_thumbnail(partial(_drawn, sound, audio)) for sound in row.audios]
        turns = tuple(replace(turn, text=plain(turn.text)) for turn in row.history)
        row = replace(row, question=plain(row.question), history=turns)
        shown.append((row, config.rewards.label_of(row.metadata), images))
    return shown


def _image(image: ImageSource, data: DataConfig) -> Image.Image:
    return decode_image(read_image(image, data), image, data)


def _strip(video: Video, data: DataConfig) -> Image.Image:
    frames = decode_video(load_video(video, data), data)
    shown = np.unique(np.linspace(0, len(frames) - 1, STRIP_FRAMES).round().astype(int))
    return Image.fromarray(np.concatenate(frames[shown], axis=1))


def _drawn(sound: Audio, limits: AudioLimits) -> Image.Image:
    return draw_sound(decode_audio(load_audio(sound, limits), limits), THUMBNAIL_SIZE)


def _audio_limits(data: DataConfig) -> AudioLimits:
    """Returns limits without a model, so that only `data.audio` bounds a sound."""
    return AudioLimits(data.audio, AUDIO_RATE, ceil(data.audio.max_seconds * AUDIO_RATE))


def _thumbnail(decode: Callable[[], Image.Image]) -> str:
    try:
        image = decode()
    except MediaError:  # damaged behind its header, which a check does not read
        return ""
    image.thumbnail(THUMBNAIL_SIZE)
    png = BytesIO()
    image.save(png, format="PNG")
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()


def _facts(
    measured: SplitMeasurements, skipped: Sequence[Skipped], num_rows: int, unit: str
) -> list[tuple[str, str, str]]:
    lengths, num_checked = measured.lengths, len(measured.lengths) + len(skipped)
    num_images = sum(num * rows for num, rows in measured.images.items())
    return [
        ("rows", f"{num_rows:,}", "of the split"),
        ("usable", f"{len(lengths):,}", f"of {num_checked:,} that were checked"),
        ("skipped", f"{len(skipped):,}", f"{100 * len(skipped) / max(1, num_checked):.1f} %"),
        ("images", f"{num_images:,}", "of usable rows"),
        ("videos", f"{measured.num_videos:,}", "of usable rows"),
        ("sounds", f"{measured.num_sounds:,}", "of usable rows"),
        ("shortest", f"{min(lengths):,}" if lengths else "–", f"prompt, in {unit}"),
        ("median", f"{int(np.median(lengths)):,}" if lengths else "–", unit),
        ("longest", f"{max(lengths):,}" if lengths else "–", unit),
        ("labels", f"{len(measured.labels):,}", "for reward recipes"),
    ]


def _source(data: DataConfig) -> str:
    if data.mixture.sources:
        return ", ".join(f"{name} x {source.weight:g}" for name, source in data.mixture.sources.items())
    return f"{data.kind}, row format {data.row_format}"

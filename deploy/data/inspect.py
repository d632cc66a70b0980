"""`mobula data inspect`."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from io import BytesIO
from math import ceil
from pathlib import Path

import numpy as np
from markupsafe import Markup
from PIL import Image
from rich.console import Console

from mobula.actors.datasets.clips import Audio, Video
from mobula.actors.datasets.images import ImageSource
from mobula.actors.datasets.open_split import open_split
from mobula.actors.datasets.prompts import RowChecker, checked_rows
from mobula.actors.datasets.rows import Row, Skipped
from mobula.actors.processors.audio import AudioLimits, check_audio, decode_audio, draw_sound, load_audio
from mobula.actors.processors.chat import ChatProcessor
from mobula.actors.processors.image import check_image, decode_image, read_image
from mobula.actors.processors.video import check_video, decode_video, load_video
from mobula.cluster.errors import MediaError, PreflightError
from mobula.cluster.records.markup import plain
from mobula.cluster.records.media import MediaStore
from mobula.configs.schema import DataConfig, RunConfig
from mobula.deploy.pages.page import STYLE, environment, write_number
from mobula.deploy.preflight.rows import find_in_rows, row_notes
from mobula.deploy.wiring.preparation import ensure_data, ensure_model

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

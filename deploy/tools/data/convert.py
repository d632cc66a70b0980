"""`mobula data convert`: the rows of a data set, written for another reader and in another row format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from mobula.actors.datasets.formats import FORMATS
from mobula.actors.datasets.formats.base import StoredMedia
from mobula.actors.datasets.open_split import open_split
from mobula.actors.datasets.rows import Row, RowError, Skipped
from mobula.actors.datasets.writers import WRITERS
from mobula.actors.datasets.writers.base import PictureFile, Writer
from mobula.actors.processors.audio import whole_audio
from mobula.actors.processors.image import decode_image, read_image
from mobula.actors.processors.video import VideoLimits
from mobula.actors.processors.video_file import whole_video
from mobula.cluster.errors import PreflightError, SkippedSample
from mobula.cluster.records.markup import BREAK
from mobula.configs.groups import groups, own_values
from mobula.configs.schema import RunConfig
from mobula.configs.schema.data import AudioConfig
from mobula.deploy.wiring.preparation import ensure_data

NUM_NAMED = 20


def targets() -> dict[str, tuple[str, str]]:
    """Options of the group `data` that can be written -> reader and row format."""
    found = {}
    for option in groups()["data"]:
        said = own_values("data", option)["data"]
        if said["kind"] in WRITERS:
            found[option] = (said["kind"], said.get("row_format", "question"))
    return found


def convert(config: RunConfig, output: Path, target: str, splits: Sequence[str], console: Console) -> int:
    """Write the splits into the folder `output`; returns the exit code.

    Raises:
        PreflightError: the target is unknown, the folder is in use, a split cannot be read or written, or more than
            `data.max_skipped_fraction` of it is unusable.
    """
    if target not in targets():
        raise PreflightError(f"--to {target} is unknown: use one of {', '.join(targets())}")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise PreflightError(f"{output} is there and not an empty folder: give another folder, or remove it first")
    kind, row_format = targets()[target]
    ensure_data(config)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as staging:
            written = Path(staging) / "data"
            written.mkdir()
            for split in splits:
                with closing(WRITERS[kind](written, split)) as writer:
                    num, skipped = _write(config, split, writer, row_format)
                _say(console, f"{split}: {num:,} rows written", skipped)
            written.replace(output)  # whole or not at all; an empty folder is replaced
    except (OSError, ValueError) as error:
        raise PreflightError(f"{output} cannot be written: {error}") from error
    console.print(f"{output} is complete: read it with data={target} data.path={output}", markup=False, soft_wrap=True)
    return 0


def _write(config: RunConfig, split: str, writer: Writer, row_format: str) -> tuple[int, list[Skipped]]:
    """The number of rows written, and what was skipped."""
    rows = open_split(config.data, split, config.rewards.label_key).rows
    limits = VideoLimits.of(config.data)
    skipped: list[Skipped] = []
    most = config.data.max_skipped_fraction * len(rows)
    for place in range(len(rows)):
        sample = ""
        try:
            row = rows[place]
            sample = row.sample_id
            writer.write(_record(row, limits, config.data.audio, writer, row_format))
        except SkippedSample as error:
            skipped.append(Skipped(error.sample if isinstance(error, RowError) else sample, error.reason, str(error)))
            if len(skipped) > most:
                raise PreflightError(
                    f"more than data.max_skipped_fraction={config.data.max_skipped_fraction:g} of the split {split} is "
                    f"unusable, at last {skipped[-1]}: fix the rows or raise it"
                ) from error
    return len(rows) - len(skipped), skipped


def _record(row: Row, limits: VideoLimits, audio: AudioConfig, writer: Writer, row_format: str) -> dict[str, Any]:
    """The row as a record of the format; its media are stored once all of them are whole."""
    if row_format != "messages" and any(BREAK in text for text in (row.question, *(t.text for t in row.history))):
        raise ValueError(f"{row.sample_id} holds a placeholder of media as text: write the format messages")
    files = []
    for picture in row.images:
        content = read_image(picture, limits.frame)
        decode_image(content, picture, limits.frame)
        files.append(PictureFile(content, Path(str(picture)).name))
    videos = [whole_video(video, limits) for video in row.videos]
    audios = [whole_audio(sound, audio) for sound in row.audios]
    return FORMATS[row_format].write(
        row, StoredMedia(writer.images(files), writer.videos(videos), writer.audios(audios))
    )


def _say(console: Console, line: str, skipped: Sequence[Skipped]) -> None:
    reasons = ", ".join(f"{reason} {num:,}" for reason, num in Counter(s.reason for s in skipped).items())
    console.print(f"{line}; {f'skipped: {reasons}' if skipped else 'none skipped'}", markup=False, soft_wrap=True)
    for sample in skipped[:NUM_NAMED]:
        console.print(f"  {sample}", markup=False, soft_wrap=True)
    if len(skipped) > NUM_NAMED:
        console.print(f"  and {len(skipped) - NUM_NAMED:,} more", markup=False)

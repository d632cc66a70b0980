"""DataSurvey: fingerprints, labels and pictures of the rows of the splits that a run reads."""

from __future__ import annotations

import hashlib
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO

import numpy as np
from PIL import Image

from mobula.actors.datasets.open_split import open_split
from mobula.actors.datasets.rows import Row
from mobula.actors.processors.image import ImageLimits, decode_image, read_image
from mobula.cluster.errors import DatasetError, SkippedSample
from mobula.configs.schema import RunConfig

TRAIN = "train"
MAX_ROWS = 20_000  # of a split
MAX_S = 20.0  # of a split; further rows are not read
NUM_SHOWN = 3  # rows of one kind whose pictures are kept
SHOWN_PIXELS = 128  # longest side
FLAT = 2.0  # standard deviation of the pixels of a blank picture, of 255
_PLACEHOLDER = re.compile(r"<\w+>")


@dataclass(frozen=True)
class PicturedRow:
    """A row with small PNGs of its pictures."""

    sample_id: str
    pngs: tuple[bytes, ...]


@dataclass
class SplitSurvey:
    """Rows of one split: fingerprints of question and media with the ids that have them, labels, pictures."""

    num_rows: int
    rows: dict[str, list[str]] = field(default_factory=dict)  # fingerprint -> sample ids
    labels: Counter[str] = field(default_factory=Counter)
    texts: Counter[str] = field(default_factory=Counter)  # normalised questions
    pictures: Counter[str] = field(default_factory=Counter)  # digest of all pixels of a row -> rows
    num_blank: int = 0
    num_pictures: int = 0
    blank: list[PicturedRow] = field(default_factory=list)
    shared: list[PicturedRow] = field(default_factory=list)  # rows with the pictures of an earlier row
    repeated: list[PicturedRow] = field(default_factory=list)  # rows with question and pictures of an earlier row
    leaked: list[PicturedRow] = field(default_factory=list)  # held-out rows that are training rows, too

    @property
    def num_read(self) -> int:
        return sum(map(len, self.rows.values()))

    @property
    def num_repeated(self) -> int:
        """Rows whose fingerprint occurred before."""
        return self.num_read - len(self.rows)


@dataclass(frozen=True)
class DataSurvey:
    """The surveyed splits: training rows, and held-out rows."""

    train: SplitSurvey
    held_out: SplitSurvey
    held_out_name: str

    @property
    def leaked(self) -> list[tuple[str, str]]:
        """Returns (held-out id, training id) of the held-out rows that are training rows, too."""
        both = [key for key in self.held_out.rows if key in self.train.rows]
        return [(sample, self.train.rows[key][0]) for key in both for sample in self.held_out.rows[key]]


def survey(config: RunConfig) -> DataSurvey | None:
    """Reads up to `MAX_ROWS` rows of each split; None without a data set, or if it is not on this machine."""
    if config.environment.is_on or config.offline.is_on:
        return None
    held_out = config.evaluation.split
    try:
        train = _split(config, TRAIN)
        return DataSurvey(train, _split(config, held_out, train), held_out)
    except (DatasetError, OSError):
        return None


def _split(config: RunConfig, name: str, train: SplitSurvey | None = None) -> SplitSurvey:
    """Surveys a split; with `train`, rows of it that the split has, too, are shown."""
    rows: Sequence[Row] = open_split(config.data, name, config.rewards.label_key).rows
    limits = ImageLimits(config.data.max_image_bytes, config.data.max_decoded_pixels)
    found, end = SplitSurvey(len(rows)), time.monotonic() + MAX_S
    stride = max(1, len(rows) // MAX_ROWS)
    for index in range(0, len(rows), stride):
        if time.monotonic() > end:
            break
        try:
            _add(found, rows[index], limits, train)
        except SkippedSample:
            continue  # counted by the checks of the data
    return found


def _add(found: SplitSurvey, row: Row, limits: ImageLimits, train: SplitSurvey | None) -> None:
    text = " ".join(" ".join([*(turn.text for turn in row.history), row.question]).casefold().split())
    images = [decode_image(read_image(source, limits), source, limits) for source in row.images]
    digests = []
    for image in images:
        pixels = np.asarray(image)  # uint8 [H, W, 3]
        digests.append(hashlib.sha256(pixels.tobytes() + str(pixels.shape).encode()).hexdigest())
        found.num_pictures += 1
        if pixels.std() < FLAT:
            found.num_blank += 1
            _show(found.blank, row, images)
    media = [*digests, *(str(each) for each in (*row.videos, *row.audios))]
    key = hashlib.sha256("\0".join([text, *media]).encode()).hexdigest()
    if key in found.rows:
        _show(found.repeated, row, images)
    if train is not None and key in train.rows:
        _show(found.leaked, row, images)
    found.rows.setdefault(key, []).append(row.sample_id)
    found.labels[row.answer.strip().casefold()] += 1
    found.texts[_PLACEHOLDER.sub("", text).strip()] += 1
    if digests:
        shared = "".join(digests)
        if shared in found.pictures:
            _show(found.shared, row, images)
        found.pictures[shared] += 1


def _show(rows: list[PicturedRow], row: Row, images: Sequence[Image.Image]) -> None:
    if len(rows) < NUM_SHOWN:
        rows.append(PicturedRow(row.sample_id, tuple(map(_png, images))))


def _png(image: Image.Image) -> bytes:
    small = image.copy()
    small.thumbnail((SHOWN_PIXELS, SHOWN_PIXELS))
    png = BytesIO()
    small.save(png, format="PNG")
    return png.getvalue()

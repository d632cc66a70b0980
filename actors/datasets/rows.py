"""Row: one sample of a dataset in the form that every reader gives it, and how unusable samples are named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from mobula.actors.datasets.audios import Audio
from mobula.actors.datasets.images import ImageSource
from mobula.actors.datasets.videos import Video
from mobula.cluster.errors import SkippedSample
from mobula.cluster.records.markup import PLACEHOLDERS

IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER, AUDIO_PLACEHOLDER = PLACEHOLDERS.values()
NUM_NAMED = 3  # skipped samples that an error message names


class AnyRow(Protocol):
    """One sample of a dataset: a `Row`, or of an offline job a `Conversation` or an `ImagePair`."""

    @property
    def sample_id(self) -> str: ...


R = TypeVar("R", bound=AnyRow)
R_co = TypeVar("R_co", bound=AnyRow, covariant=True)


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation; `text` holds one `<image>` for each image, `<video>` for each video and
    `<audio>` for each sound of it, and is otherwise marked up as `mobula.cluster.records.markup` says."""

    role: str  # system, user, assistant or tool
    text: str


@dataclass(frozen=True)
class Row:
    """One question with its answer.

    `history` and `question`, in this order, hold one `<image>` for each of `images`, one `<video>` for each of `videos`
    and one `<audio>` for each of `audios`, and are otherwise marked up as `cluster.records.markup` says. `chosen` and
    `rejected` are the two responses of a preference pair.
    """

    sample_id: str
    question: str  # the last user turn
    answer: str
    solution: str  # the response that a supervised step teaches
    images: tuple[ImageSource, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    history: tuple[Turn, ...] = ()  # the turns before the question
    chosen: str | None = None
    rejected: str | None = None
    videos: tuple[Video, ...] = ()
    audios: tuple[Audio, ...] = ()

    @property
    def references(self) -> tuple[str, ...]:
        """The texts that reward functions compare a response with, the literal answer first."""
        return self.answer, self.solution


class RowError(SkippedSample):
    """A record cannot be used as a row; `sample` names it: file, row and id."""

    def __init__(self, reason: str, detail: str, sample: str = "") -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.sample = sample


@dataclass(frozen=True)
class Skipped:
    """One sample that is not used. `reason` is a word to count by, `detail` a sentence to act on."""

    sample: str  # "train.jsonl:12 (id)" for a record of a file, else the sample's id
    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{self.sample}: {self.detail}"


@dataclass(frozen=True)
class Split(Generic[R_co]):
    """The rows of one split, in the order of the files, and what was left out."""

    name: str
    rows: Sequence[R_co]
    skipped: tuple[Skipped, ...]


def count_by_reason(skipped: Iterable[Skipped]) -> dict[str, int]:
    """reason -> number of skipped samples."""
    return dict(Counter(sample.reason for sample in skipped))


def first_few(skipped: Iterable[Skipped]) -> str:
    """The first few skipped samples as the tail of an error message; empty if there is none."""
    names = [str(sample) for sample in skipped]
    return f" ({'; '.join(names[:NUM_NAMED])}{'; ...' if len(names) > NUM_NAMED else ''})" if names else ""

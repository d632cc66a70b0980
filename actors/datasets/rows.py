"""Row: a sample of a dataset, the same type for every reader; RowError and Skipped: unusable samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from mobula.actors.datasets.media import Audio, ImageSource, Video
from mobula.cluster.errors import SkippedSample
from mobula.cluster.records.markup import PLACEHOLDERS

IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER, AUDIO_PLACEHOLDER = PLACEHOLDERS.values()
NUM_NAMED = 3  # skipped samples in an error message


class AnyRow(Protocol):
    """One sample of a dataset: a `Row`; for offline jobs a `Conversation` or an `ImagePair`."""

    @property
    def sample_id(self) -> str: ...
    @property
    def unread(self) -> tuple[str, ...]:
        """Fields of the record that are not read; reward functions get those of a `Row`."""


R = TypeVar("R", bound=AnyRow)
R_co = TypeVar("R_co", bound=AnyRow, covariant=True)


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation. `text` has a placeholder for each medium (`<image>`, `<video>`, `<audio>`) and the
    markup of `mobula.cluster.records.markup`."""

    role: str  # system, user, assistant or tool
    text: str
    in_loss: bool = True  # of supervised fine-tuning; only turns of the assistant are
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)  # for the chat template, such as `tool_calls`

    @property
    def is_trained(self) -> bool:
        return self.in_loss and self.role == "assistant"


@dataclass(frozen=True)
class Row:
    """One question and answer. `history` and `question` have a placeholder for each medium, in order: `<image>` for
    `images`, `<video>` for `videos`, `<audio>` for `audios`; and the markup of `cluster.records.markup`. `chosen` and
    `rejected` are the two responses of a preference pair."""

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
    template: str = ""  # JSON object of `tools` and `chat_template_kwargs` for the chat template; empty for none
    unread: tuple[str, ...] = ()

    @property
    def references(self) -> tuple[str, ...]:
        """Texts that reward functions compare a response with: the literal answer, then the solution."""
        return self.answer, self.solution


class RowError(SkippedSample):
    """A record is unusable as a row; `sample` is its name: file, row and id."""

    def __init__(self, reason: str, detail: str, sample: str = "") -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.sample = sample


@dataclass(frozen=True)
class Skipped:
    """A skipped sample. `reason` is the name of the counter, `detail` the message for the user."""

    sample: str  # "train.jsonl:12 (id)" for a record of a file, else the sample's id
    reason: str
    detail: str

    @classmethod
    def of(cls, sample: str, error: SkippedSample) -> Skipped:
        """`sample` is the row's id; a RowError has the name of the record."""
        return cls(error.sample if isinstance(error, RowError) else sample, error.reason, str(error))

    def __str__(self) -> str:
        return f"{self.sample}: {self.detail}"


@dataclass(frozen=True)
class Split(Generic[R_co]):
    """The rows of one split, in the order of the files, and skipped records."""

    name: str
    rows: Sequence[R_co]
    skipped: tuple[Skipped, ...]


def count_by_reason(skipped: Iterable[Skipped]) -> dict[str, int]:
    return dict(Counter(sample.reason for sample in skipped))


def first_few(skipped: Iterable[Skipped]) -> str:
    """Formats the first few skipped samples as the end of an error message; "" if there is none."""
    names = [str(sample) for sample in skipped]
    return f" ({'; '.join(names[:NUM_NAMED])}{'; ...' if len(names) > NUM_NAMED else ''})" if names else ""

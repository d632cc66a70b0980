"""What checks read, their registry, and trends of a run."""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from io import BytesIO

import numpy as np
from PIL import Image

from mobula.actors.datasets.open_split import splits_of
from mobula.actors.datasets.rows import Row
from mobula.actors.processors.media import decode_image, read_image
from mobula.cluster.errors import DatasetError, MobulaError, SkippedSample
from mobula.cluster.metrics.definitions import CounterName, MetricName
from mobula.cluster.metrics.report.run_folder import SERIOUS, Evidence, RunFinding, RunFolder, RunVerdict
from mobula.cluster.metrics.report.samples import AnswerGroup, KeptAnswer
from mobula.cluster.metrics.step_records import StepRecord
from mobula.configs.schema import DataConfig, RunConfig
from mobula.configs.schema.data import DataKind
from mobula.deploy.preflight.checks import LoadedModel

TRAIN = "train"
MAX_ROWS = 20_000  # of a split
MAX_S = 20.0  # of a split; further rows are not read
NUM_SHOWN = 3  # rows of one kind whose pictures are kept
SHOWN_PIXELS = 128  # longest side
FLAT = 2.0  # standard deviation of the pixels of a blank picture, of 255
_PLACEHOLDER = re.compile(r"<\w+>")


@dataclass(frozen=True)
class PicturedRow:
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


@dataclass(frozen=True)
class DataSurvey:
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
    if config.data.kind is DataKind.ENVIRONMENT or config.offline.is_on:
        return None
    held_out = config.evaluation.split
    try:
        train = _split(config, TRAIN)
        return DataSurvey(train, _split(config, held_out, train), held_out)
    except (DatasetError, OSError):
        return None


def _split(config: RunConfig, name: str, train: SplitSurvey | None = None) -> SplitSurvey:
    """Surveys a split; with `train`, rows of it that the split has, too, are shown."""
    rows: Sequence[Row] = splits_of(config.data, config.rewards.label_key)(name).rows
    found, end = SplitSurvey(len(rows)), time.monotonic() + MAX_S
    stride = max(1, len(rows) // MAX_ROWS)
    for index in range(0, len(rows), stride):
        if time.monotonic() > end:
            break
        try:
            _add(found, rows[index], config.data, train)
        except SkippedSample:
            continue  # counted by the checks of the data
    return found


def _add(found: SplitSurvey, row: Row, data: DataConfig, train: SplitSurvey | None) -> None:
    text = " ".join(" ".join([*(turn.text for turn in row.history), row.question]).casefold().split())
    images = [decode_image(read_image(source, data), source, data) for source in row.images]
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


MIN_POINTS = 8  # of a curve, for a trend
SURE = 3.0  # standard errors


@dataclass(frozen=True)
class Trend:
    """Means of the first and the last quarter of a curve, and their difference in standard errors."""

    first: float
    last: float
    z: float
    num: int

    @property
    def rises(self) -> bool:
        return self.z > SURE

    @property
    def falls(self) -> bool:
        return self.z < -SURE

    @classmethod
    def of(cls, values: Sequence[float]) -> Trend | None:
        """Returns the trend of a curve; None if it has fewer than `MIN_POINTS` finite values."""
        finite = np.array([value for value in values if math.isfinite(value)])
        if len(finite) < MIN_POINTS:
            return None
        size = max(3, len(finite) // 4)
        first, last = finite[:size], finite[-size:]
        error = math.sqrt((first.var(ddof=1) + last.var(ddof=1)) / size)
        difference = float(last.mean() - first.mean())
        z = difference / error if error > 0 else math.copysign(math.inf, difference) if difference else 0.0
        return cls(float(first.mean()), float(last.mean()), z, len(finite))


@dataclass(frozen=True)
class Agreement:
    """Agreement of answers with labels beyond chance.

    `observed` is the share of answers that equal their label, `expected` the share if answers were dealt to prompts at
    random, `kappa` Cohen's (observed - expected) / (1 - expected), `error` its standard error over prompts.

    Source: A Coefficient of Agreement for Nominal Scales, doi:10.1177/001316446002000104.
    """

    observed: float
    expected: float
    kappa: float
    error: float
    num_prompts: int

    @classmethod
    def of(cls, prompts: Sequence[tuple[str, Sequence[str]]]) -> Agreement | None:
        """Returns the agreement of (label, answers) pairs; None with one label or without prompts."""
        labels = Counter(label for label, _ in prompts)
        answers = Counter(answer for _, given in prompts for answer in given)
        if len(labels) < 2 or not answers:
            return None
        num_answers = sum(answers.values())
        expected = sum(num / len(prompts) * answers[label] / num_answers for label, num in labels.items())
        shares = np.array([sum(a == label for a in given) / len(given) for label, given in prompts if given])
        observed = float(shares.mean())
        error = float(shares.std(ddof=1) / math.sqrt(len(shares))) if len(shares) > 1 else math.nan
        scale = 1 - expected
        return cls(observed, expected, (observed - expected) / scale, error / scale, len(shares))


RIGHT = 0.9  # accuracy from which a task counts as solved

SAMPLED: Mapping[str, str] = {
    MetricName.REWARD_MEAN: MetricName.SAMPLED_REWARD_MEAN,
    MetricName.ACCURACY: MetricName.SAMPLED_ACCURACY,
}


@dataclass(frozen=True)
class Material:
    """What the checks read. `run` is None for a configuration without a run.

    `read_data` and `read_model` return None if the data or the files of the model are not on this machine.
    """

    config: RunConfig
    run: RunFolder | None = None
    read_data: Callable[[], DataSurvey | None] = field(default=lambda: None, repr=False)
    read_model: Callable[[], LoadedModel | None] = field(default=lambda: None, repr=False)

    @property
    def steps(self) -> list[StepRecord]:
        return list(self.run.steps) if self.run else []

    @property
    def settled(self) -> list[StepRecord]:
        """The steps after the warm-up of the learning rate."""
        return [step for step in self.steps if step.step > self.config.learner.warmup_steps]

    @property
    def answers(self) -> list[AnswerGroup]:
        """Drawn groups with text, by step."""
        return [group for group in self.run.samples.answers if group.answers] if self.run else []

    @cached_property
    def data(self) -> DataSurvey | None:
        return self.read_data()

    @cached_property
    def _model(self) -> tuple[LoadedModel | None, str]:
        try:
            return self.read_model(), ""
        except (MobulaError, ValueError, OSError) as error:  # the user's mistakes, by whichever part finds them
            return None, str(error)

    @property
    def model(self) -> LoadedModel | None:
        return self._model[0]

    @property
    def model_problem(self) -> str:
        """Why the files of the model cannot be used; empty if they can, or are not on this machine."""
        return self._model[1]

    def series(self, name: str) -> list[float]:
        """Returns the finite values of a metric, in the order of the steps. Reward and accuracy are means over all
        sampled responses: a filter chooses trained groups by their rewards."""
        names = (SAMPLED.get(name, name), name)
        found = [next((step.values[n] for n in names if n in step.values), math.nan) for step in self.steps]
        return [value for value in found if math.isfinite(value)]

    def component(self, name: str) -> list[float]:
        return [step.components[name] for step in self.steps if name in step.components]

    def trend(self, name: str) -> Trend | None:
        return Trend.of(self.series(name))

    def late(self, name: str) -> float | None:
        """Returns the mean of a metric over the last quarter of the steps; None without values."""
        values = self.series(name)
        return mean(values[-max(1, len(values) // 4) :]) if values else None

    def early(self, name: str) -> float | None:
        """Returns the mean of a metric over the first quarter of the steps; None without values."""
        values = self.series(name)
        return mean(values[: max(1, len(values) // 4)]) if values else None

    def count(self, name: CounterName) -> dict[str, int]:
        """Returns reason -> count at the newest step."""
        counters = self.steps[-1].counters if self.steps else {}
        return dict(counters[name]) if name in counters else {}

    def late_count(self, name: CounterName) -> dict[str, int]:
        """Returns reason -> count over the last quarter of the steps."""
        if not self.steps:
            return {}
        before = self.steps[-max(1, len(self.steps) // 4) - 1 :][0].counters if len(self.steps) > 1 else {}
        earlier = before[name] if name in before else {}
        return {reason: num - earlier.get(reason, 0) for reason, num in self.count(name).items()}

    @property
    def num_samples(self) -> int:
        return int(sum(step.values[MetricName.NUM_SAMPLES] for step in self.steps))

    @cached_property
    def is_solved(self) -> bool:
        """Whether the accuracy of the last quarter is at least `RIGHT`."""
        accuracy = self.late(MetricName.ACCURACY)
        return accuracy is not None and accuracy >= RIGHT

    @cached_property
    def is_learning(self) -> bool:
        reward = self.trend(MetricName.REWARD_MEAN)
        return self.is_solved or (reward is not None and reward.rises)

    @property
    def kept_answers(self) -> list[KeptAnswer]:
        return [answer for group in self.answers for answer in group.answers]


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


SYMPTOMS = (
    "reward_parser", "truncation", "end_of_text", "answers_and_labels", "uniform_groups", "variety", "language_mix",
    "kl", "entropy", "clipped_tokens", "rejected_groups", "skipped_steps", "reward_exploitation", "reward_trend",
)  # fmt: skip
"""What a policy shows that has lost its form, whatever the cause."""


NOTHING_TO_COMPARE = ("uniform_groups", "skipped_steps", "rejected_groups", "answers_and_labels", "reward_trend")


class Needs(StrEnum):
    """What a check reads; the value says what is missing."""

    CONFIG = ""
    STEPS = "the run has no finished step"
    ANSWERS = "samples.jsonl has no drawn answers"
    DATA = "the data are not on this machine"
    MODEL = "the files of policy.model are not on this machine"


IS_THERE: Mapping[Needs, Callable[[Material], bool]] = {
    Needs.CONFIG: lambda material: True,
    Needs.STEPS: lambda material: bool(material.steps),
    Needs.ANSWERS: lambda material: bool(material.answers),
    Needs.DATA: lambda material: material.data is not None,
    Needs.MODEL: lambda material: material.model is not None,
}


@dataclass(frozen=True)
class Check:
    """One check. `measure` returns a finding without a name, and reads nothing but the material."""

    name: str
    needs: Needs
    measure: Callable[[Material], RunFinding]
    explains: tuple[str, ...] = ()  # checks that find what follows from a fault or warning of this one
    at_once: bool = False  # its fault needs no number of steps


CHECKS: list[Check] = []  # filled by `check`


def check(
    name: str, needs: Needs, explains: tuple[str, ...] = (), *, at_once: bool = False
) -> Callable[[Callable[[Material], RunFinding]], Callable[[Material], RunFinding]]:
    def add(measure: Callable[[Material], RunFinding]) -> Callable[[Material], RunFinding]:
        CHECKS.append(Check(name, needs, measure, explains, at_once))
        return measure

    return add


def finding(
    verdict: RunVerdict,
    measured: str,
    numbers: Mapping[str, float],
    action: str = "",
    evidence: tuple[Evidence, ...] = (),
    explains: tuple[str, ...] = (),
) -> RunFinding:
    """Returns the finding of a check. `run_checks` sets its name. A finding with the verdict OK has no action."""
    return RunFinding("", verdict, measured, numbers, "" if verdict is RunVerdict.OK else action, evidence, explains)


def by_share(
    share: float, *, fault: float = math.inf, warning: float = math.inf, notice: float = math.inf
) -> RunVerdict:
    """Returns the worst verdict whose bound a share reaches."""
    bounds = {RunVerdict.FAULT: fault, RunVerdict.WARNING: warning, RunVerdict.NOTICE: notice}
    return next((verdict for verdict, bound in bounds.items() if share >= bound), RunVerdict.OK)


def unmeasured(reason: str) -> RunFinding:
    return not_measured("", reason)


def run_checks(checks: Sequence[Check], material: Material) -> Iterator[RunFinding]:
    """Yields the finding of each check; `not measured` where its material is missing or the check fails."""
    for each in checks:
        if not IS_THERE[each.needs](material):
            yield not_measured(each.name, str(each.needs))
            continue
        try:
            found = each.measure(material)
        except (ArithmeticError, KeyError, IndexError, ValueError) as error:
            # A check of a broken run meets values that no run writes. The other checks still count.
            found = unmeasured(f"the check failed: {error!r}")
        if found.verdict is RunVerdict.FAULT and each.needs in (Needs.STEPS, Needs.ANSWERS) and not each.at_once:
            num = len(material.settled)
            if num < MIN_POINTS:
                measured = f"{found.measured} (a fault needs {MIN_POINTS} steps after the warm-up, here {num})"
                found = replace(found, verdict=RunVerdict.WARNING, measured=measured)
        explains = found.explains or (each.explains if found.verdict in SERIOUS else ())
        yield replace(found, name=each.name, explains=explains)


def not_measured(name: str, reason: str) -> RunFinding:
    return RunFinding(name, RunVerdict.NOT_MEASURED, reason)

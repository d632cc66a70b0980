"""Samples of a report: texts, contact sheets and videos."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import TypeAdapter

from mobula.cluster.files import read_verified, write_atomically
from mobula.cluster.metrics.step_records import SampleRecord, strict
from mobula.cluster.records.json_lines import read_lines

if TYPE_CHECKING:
    from mobula.cluster.records.media import ProcessedMedia
    from mobula.cluster.records.trajectory import Reward, ScoredGroup, Trajectory, TrajectoryGroup

EVALUATIONS_FOLDER = "evaluations"  # of the run folder
SHEETS_FILE = "sheets.json"  # in it: a row for each sheet
T = TypeVar("T")


@dataclass(frozen=True)
class Sheet:
    """The images of one evaluation."""

    suite: str
    version: int
    sha256: str
    prompts: Sequence[str]
    png: bytes


def read_sheets(run_folder: Path) -> list[Sheet]:
    """Returns the first and the last sheet of each suite."""
    folder = run_folder / EVALUATIONS_FOLDER
    if not (folder / SHEETS_FILE).exists():
        return []
    rows = json.loads((folder / SHEETS_FILE).read_text(encoding="utf-8"))
    by_suite: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["version"]):
        by_suite.setdefault(row["suite"], []).append(row)
    chosen = [row for sheets in by_suite.values() for row in _first_and_last(sheets)]
    pngs = [read_verified(folder / row["file"], row["sha256"], SHEETS_FILE) for row in chosen]
    return [
        Sheet(row["suite"], row["version"], row["sha256"], row["prompts"], png)
        for row, png in zip(chosen, pngs, strict=True)
    ]


def write_rows(folder: Path, suite: str, version: int, values: Mapping[str, float]) -> None:
    """Writes the value of each row of an evaluation, which `read_rows` pairs with those of another run."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"rows-{suite}-{version}.json", json.dumps(values))


def read_rows(run_folder: Path, suite: str) -> dict[str, float]:
    """The values by row of the newest evaluation of a suite; empty if the run wrote none."""
    paths = (run_folder / EVALUATIONS_FOLDER).glob(f"rows-{suite}-*.json")
    newest = max(paths, key=lambda path: int(path.stem.rpartition("-")[2]), default=None)
    return {} if newest is None else json.loads(newest.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class HeldOutAnswer:
    """The answer to one held-out row; `images` are thumbnails (PNG)."""

    sample_id: str
    prompt: str
    references: tuple[str, ...]
    images: tuple[bytes, ...]
    response: str
    reward: float | None  # None if it was not scored


def write_answers(folder: Path, version: int, answers: Sequence[HeldOutAnswer]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [strict(asdict(a) | {"images": [base64.b64encode(png).decode() for png in a.images]}) for a in answers]
    write_atomically(folder / f"answers-{version}.json", json.dumps({"rows": rows}, ensure_ascii=False))


def read_answers(run_folder: Path) -> list[tuple[HeldOutAnswer, HeldOutAnswer]]:
    """The answers to each row at the first and the last version that have one; empty without two versions."""
    paths = (run_folder / EVALUATIONS_FOLDER).glob("answers-*.json")
    ordered = sorted(paths, key=lambda path: int(path.stem.rpartition("-")[2]))
    if len(ordered) < 2:
        return []
    first, last = ({a.sample_id: a for a in _answers_in(path)} for path in _first_and_last(ordered))
    return [(answer, last[name]) for name, answer in first.items() if name in last]


def _answers_in(path: Path) -> Iterator[HeldOutAnswer]:
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        images, references = tuple(map(base64.b64decode, row["images"])), tuple(row["references"])
        yield HeldOutAnswer(**{**row, "images": images, "references": references})


def _first_and_last(items: Sequence[T]) -> Sequence[T]:
    return items if len(items) < 2 else (items[0], items[-1])


ARTIFACTS_FOLDER = "artifacts"  # of the run folder
INDEX = "artifacts.jsonl"  # in it: a row per image or video
MAX_VIDEOS = 4  # per step
MAX_BYTES = 4 << 20  # of an embedded video; for a larger video the report has only the file name


@dataclass(frozen=True)
class Video:
    """One video."""

    file: str  # relative to the run folder
    prompt: str
    reward: float | None
    sha256: str
    poster: bytes  # JPEG of the first frame
    mp4: bytes | None


def read_artifacts(folder: Path) -> list[dict[str, Any]]:
    """Reads the rows of artifacts.jsonl; empty if the file does not exist."""
    path = folder / INDEX
    return [json.loads(line) for _, line in read_lines(path)] if path.exists() else []


def read_videos(run_folder: Path) -> list[tuple[int, list[Video]]]:
    """Returns (step, videos) of the first and the last step with videos."""
    rows = [row for row in read_artifacts(run_folder / ARTIFACTS_FOLDER) if "poster" in row]
    videos: list[tuple[int, list[Video]]] = []
    for step in _first_and_last(sorted({row["step"] for row in rows})):
        of_step = [row for row in rows if row["step"] == step]
        videos.append((step, [_video(run_folder / ARTIFACTS_FOLDER, row) for row in of_step[:MAX_VIDEOS]]))
    return videos


def _video(folder: Path, row: Mapping[str, Any]) -> Video:
    mp4 = read_verified(folder / row["file"], row["sha256"], INDEX)
    return Video(
        file=f"{ARTIFACTS_FOLDER}/{row['file']}",
        prompt=row["prompt"],
        reward=row["reward"],
        sha256=row["sha256"],
        poster=(folder / row["poster"]).read_bytes(),
        mp4=mp4 if len(mp4) <= MAX_BYTES else None,
    )


# SampleKeeper: keeps a few responses for the report: best, worst and random, early and late, with their images.
#
# The choice needs only the rewards, which the driver has; a group is fetched once it is chosen.

Period = Literal["early", "late"]
Kind = Literal["best", "worst", "random"]
PERIODS: tuple[Period, ...] = ("early", "late")
KINDS: tuple[Kind, ...] = ("best", "worst", "random")
MAX_CHARACTERS = 4000  # of one prompt or response in the report
NUM_GROUPS = 4  # drawn from a step
MAX_ANSWERS = 8  # of a drawn group
MAX_ANSWER_CHARACTERS = 160  # last ones of a drawn response
NUM_LOOKS = 48  # steps of a whole run from which samples are taken, so that long runs do not fetch more


@dataclass(frozen=True)
class ReportTurn:
    """One turn of an episode: action, observation and rewards."""

    action: str
    observation: str
    rewards: Mapping[str, float]
    status: str  # of its tool calls
    media_keys: tuple[str, ...]  # of the observation


@dataclass(frozen=True)
class ReportSample:
    """One response in the report. `media_keys` are keys of thumbnails."""

    step: int
    period: Period
    kind: Kind
    sample_id: str
    trajectory_id: str
    prompt: str
    response: str
    references: tuple[str, ...]
    reward: float
    components: Mapping[str, float]
    reasons: Mapping[str, str]
    finish_reason: str
    num_tokens: int
    media_keys: tuple[str, ...]
    turns: tuple[ReportTurn, ...] = ()


@dataclass(frozen=True)
class KeptAnswer:
    """One response of a drawn group; `text` is its end. `repetition` is the share of word 4-grams that occurred
    before in it."""

    text: str
    reward: float | None
    components: Mapping[str, float]
    reasons: Mapping[str, str]
    finish_reason: str
    num_tokens: int
    repetition: float


@dataclass(frozen=True)
class AnswerGroup:
    """Responses to one prompt of a step, drawn at random, for statistics of `mobula diagnose`."""

    step: int
    sample_id: str
    references: tuple[str, ...]
    answers: tuple[KeptAnswer, ...]


_SAMPLE, _ANSWERS = TypeAdapter(ReportSample), TypeAdapter(AnswerGroup)


@dataclass(frozen=True)
class SampleFile:
    """The content of `samples.jsonl`: samples, each thumbnail (PNG) once, and the drawn groups."""

    samples: tuple[ReportSample, ...]
    thumbnails: Mapping[str, bytes]
    answers: tuple[AnswerGroup, ...] = ()


@dataclass(frozen=True)
class _Candidate:
    """One response that may enter a bucket; `sibling` is its index in the group."""

    group: ScoredGroup
    sibling: int

    @property
    def reward(self) -> Reward:
        reward = self.group.rewards[self.sibling]
        assert reward is not None, "responses without a reward are no candidates"
        return reward


@dataclass(eq=False)
class SampleKeeper:
    """Keeps at most `limit` samples of a run of `num_steps`, and writes them to `path` at each change.

    There is one bucket per half of the run and kind. `best` and `worst` prefer the extreme reward and then the
    outermost step (earliest in the early half, latest in the late half); `random` is a uniform reservoir. A run that
    resumes from `version` keeps the samples up to it.
    """

    path: Path
    _: KW_ONLY
    limit: int
    num_steps: int
    seed: int
    version: int
    fetch: Callable[..., list[Any]]  # `mobula.cluster.runtime.object_store.fetch`
    timeout_s: float
    write: Callable[[Path, str], None] = write_atomically

    def __post_init__(self) -> None:
        self._capacity = max(1, self.limit // (len(PERIODS) * len(KINDS)))
        self._interval = max(1, self.num_steps // NUM_LOOKS)
        earlier = read_samples(self.path)
        self._samples = [sample for sample in earlier.samples if sample.step <= self.version]
        self._thumbnails = dict(earlier.thumbnails)
        # As lines: there are up to NUM_LOOKS * NUM_GROUPS, and none changes once it is drawn.
        self._answers = [
            _line("answers", group=asdict(group)) for group in earlier.answers if group.step <= self.version
        ]

    @property
    def samples(self) -> tuple[ReportSample, ...]:
        return tuple(self._samples)

    def offer(self, step: int, groups: Sequence[ScoredGroup]) -> list[SampleRecord]:
        """Selects samples from the groups of one step, fetches and writes them, and returns them."""
        is_due = (step - 1) % self._interval == 0 or step == self.num_steps
        if not is_due or not groups:
            return []
        choice = random.Random(f"{self.seed}/{step}")
        kept = [sample for kind in KINDS if (sample := self._offer_one(step, kind, groups, choice)) is not None]
        self._answers += [_line("answers", group=asdict(group)) for group in self._drawn(step, groups)]
        if kept or self._answers:
            shown = [keys for s in self._samples for keys in (s.media_keys, *(turn.media_keys for turn in s.turns))]
            used = {key for keys in shown for key in keys}
            self._thumbnails = {key: png for key, png in self._thumbnails.items() if key in used}
            thumbnails = [
                _line("thumbnail", key=key, png=base64.b64encode(png).decode()) for key, png in self._thumbnails.items()
            ]
            samples = [_line("sample", sample=asdict(sample)) for sample in self._samples]
            self.write(self.path, "".join([*thumbnails, *samples, *self._answers]))
        return [self._record(sample) for sample in kept]

    def _drawn(self, step: int, groups: Sequence[ScoredGroup]) -> Iterator[AnswerGroup]:
        chosen = random.Random(f"{self.seed}/{step}/answers").sample(groups, min(NUM_GROUPS, len(groups)))
        references = [scored.group for scored in chosen]
        loaded: list[TrajectoryGroup] = self.fetch(references, timeout_s=self.timeout_s, what=f"answers of step {step}")
        for scored, group in zip(chosen, loaded, strict=True):
            pairs = list(zip(scored.rewards, group.trajectories, strict=True))[:MAX_ANSWERS]
            answers = tuple(_answer(reward, trajectory) for reward, trajectory in pairs)
            yield AnswerGroup(step, group.prompt.sample_id, group.prompt.references, answers)

    def _offer_one(
        self, step: int, kind: Kind, groups: Sequence[ScoredGroup], choice: random.Random
    ) -> ReportSample | None:
        period: Period = "early" if 2 * step <= self.num_steps else "late"
        bucket = [s for s in self._samples if (s.period, s.kind) == (period, kind)]
        candidate = _choose(kind, groups, choice, known={s.sample_id for s in bucket})
        if candidate is None:
            return None
        displaced = None
        if len(bucket) >= self._capacity:
            displaced = self._displaced(bucket, kind, period, candidate, step, choice)
            if displaced is None:
                return None
        sample = self._load(candidate, step, period, kind)
        self._samples = [s for s in self._samples if s is not displaced] + [sample]
        return sample

    def _record(self, sample: ReportSample) -> SampleRecord:
        images = tuple(self._thumbnails[key] for key in sample.media_keys if key in self._thumbnails)
        return SampleRecord(
            sample.step, sample.kind, sample.prompt, sample.response, sample.references, sample.reward, images
        )

    def _displaced(
        self,
        bucket: Sequence[ReportSample],
        kind: Kind,
        period: Period,
        candidate: _Candidate,
        step: int,
        choice: random.Random,
    ) -> ReportSample | None:
        """Returns the sample that the candidate replaces in a full bucket; None if the candidate is not kept."""
        if kind == "random":
            first = 1 if period == "early" else self.num_steps // 2 + 1
            num_seen = 1 + (step - first) // self._interval
            index = choice.randrange(max(num_seen, len(bucket) + 1))
            return bucket[index] if index < len(bucket) else None
        least = min(bucket, key=lambda s: _rank(kind, period, s.reward, s.step))
        is_better = _rank(kind, period, candidate.reward.value, step) > _rank(kind, period, least.reward, least.step)
        return least if is_better else None

    def _load(self, candidate: _Candidate, step: int, period: Period, kind: Kind) -> ReportSample:
        group: TrajectoryGroup
        what = f"group {candidate.group.summary.group_id}"
        (group,) = self.fetch([candidate.group.group], timeout_s=self.timeout_s, what=what)
        trajectory = group.trajectories[candidate.sibling]
        handles = (*group.prompt.media, *trajectory.actions.media)
        missing = [handle for handle in handles if handle.key not in self._thumbnails]
        if missing:
            what = f"images of {group.prompt.sample_id}"
            references = [handle.reference for handle in missing]
            media: list[ProcessedMedia] = self.fetch(references, timeout_s=self.timeout_s, what=what)
            self._thumbnails |= {h.key: m.thumbnail for h, m in zip(missing, media, strict=True) if m.thumbnail}
        return ReportSample(
            step=step,
            period=period,
            kind=kind,
            sample_id=group.prompt.sample_id,
            trajectory_id=trajectory.trajectory_id,
            prompt=_clip(group.prompt.text),
            response=_clip(trajectory.response.text),
            references=group.prompt.references,
            reward=candidate.reward.value,
            components=dict(candidate.reward.components),
            reasons={name: _clip(reason) for name, reason in candidate.reward.reasons.items()},
            finish_reason=str(trajectory.finish_reason),
            num_tokens=trajectory.response.num_tokens,
            media_keys=tuple(handle.key for handle in group.prompt.media),
            turns=_turns(trajectory),
        )


def _line(kind: str, **fields: Any) -> str:
    return json.dumps({"kind": kind, **strict(fields)}, allow_nan=False) + "\n"


def read_samples(path: Path) -> SampleFile:
    """Reads the file of a `SampleKeeper`; empty if it does not exist."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return SampleFile(
        tuple(_SAMPLE.validate_python(row["sample"]) for row in rows if row["kind"] == "sample"),
        {row["key"]: base64.b64decode(row["png"]) for row in rows if row["kind"] == "thumbnail"},
        tuple(_ANSWERS.validate_python(row["group"]) for row in rows if row["kind"] == "answers"),
    )


def _choose(kind: Kind, groups: Sequence[ScoredGroup], choice: random.Random, known: set[str]) -> _Candidate | None:
    """Returns a response of this step whose prompt is not in the bucket yet; None if there is none.

    `best` is in the upper half of the step's rewards and `worst` in the lower half; if all are equal there is neither.
    """
    every = [_Candidate(g, i) for g in groups for i, reward in enumerate(g.rewards) if reward is not None]
    rewards = [c.reward.value for c in every]
    middle = (min(rewards) + max(rewards)) / 2
    sign = {"best": 1.0, "worst": -1.0, "random": 0.0}[kind]
    fit = [
        c
        for c in every
        if c.group.summary.sample_id not in known and (kind == "random" or sign * (c.reward.value - middle) > 0)
    ]
    if not fit:
        return None
    top = max(sign * c.reward.value for c in fit)
    return choice.choice([c for c in fit if sign * c.reward.value == top])


def _rank(kind: Kind, period: Period, reward: float, step: int) -> tuple[float, int]:
    """Rank in a bucket; the smallest is replaced first."""
    return (reward if kind == "best" else -reward, step if period == "late" else -step)


def _turns(trajectory: Trajectory) -> tuple[ReportTurn, ...]:
    return tuple(
        ReportTurn(
            _clip(turn.action),
            _clip(turn.observation),
            dict(turn.rewards),
            turn.status,
            tuple(handle.key for handle in media),
        )
        for turn, media in zip(trajectory.response.turns, trajectory.turn_media, strict=True)
    )


def _answer(reward: Reward | None, trajectory: Trajectory) -> KeptAnswer:
    text = trajectory.response.text
    return KeptAnswer(
        text=text[-MAX_ANSWER_CHARACTERS:],
        reward=None if reward is None else reward.value,
        components=dict(reward.components) if reward else {},
        reasons={name: why[:MAX_ANSWER_CHARACTERS] for name, why in reward.reasons.items()} if reward else {},
        finish_reason=str(trajectory.finish_reason),
        num_tokens=trajectory.response.num_tokens,
        repetition=repeated_words(text, 4),
    )


def repeated_words(text: str, ngram: int) -> float:
    """1 - distinct n-grams of words / n-grams; 0 for fewer than `ngram` + 1 words."""
    words = text.split()
    num = len(words) - ngram + 1
    return 1 - len({tuple(words[i : i + ngram]) for i in range(num)}) / num if num > 1 else 0.0


def _clip(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} […{len(text) - MAX_CHARACTERS} more]"

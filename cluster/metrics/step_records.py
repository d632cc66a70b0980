"""Records of a step: values, totals and their JSON."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import TypeAdapter

from mobula.cluster.metrics.definitions import MetricName

if TYPE_CHECKING:
    from mobula.cluster.records.trajectory import Reward, ScoredGroup
    from mobula.cluster.roles import ReplayStats


def step_values(
    groups: Sequence[ScoredGroup], replay: ReplayStats, staleness: dict[int, int], total_s: float
) -> dict[str, float]:
    """Returns rewards, lengths, ages, throughput and queue of one step that took `total_s` seconds."""
    summaries = [group.summary for group in groups]
    num_samples = sum(s.num_trajectories for s in summaries)
    num_tokens = sum(s.num_tokens for s in summaries)
    rewards = [reward.value for group in groups for reward in group.scored_rewards]
    mean = math.fsum(rewards) / len(rewards)
    return {
        MetricName.REWARD_MEAN: mean,
        MetricName.REWARD_STD: math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)),
        MetricName.REWARD_MAX: max(rewards),
        MetricName.REWARD_MIN: min(rewards),
        MetricName.NUM_GROUPS: float(len(groups)),
        MetricName.NUM_SAMPLES: float(num_samples),
        MetricName.NUM_TOKENS: float(num_tokens),
        MetricName.SAMPLES_PER_S: num_samples / total_s if total_s > 0 else math.nan,
        MetricName.TOKENS_PER_S: num_tokens / total_s if total_s > 0 else math.nan,
        MetricName.RESPONSE_LENGTH: num_tokens / num_samples,
        MetricName.TRUNCATED_FRACTION: sum(s.num_truncated for s in summaries) / num_samples,
        MetricName.MEDIA_BYTES_REFERENCED: float(sum(s.num_media_bytes * s.num_trajectories for s in summaries)),
        MetricName.BYTES_PER_TRAJECTORY: sum(s.num_bytes for s in summaries) / num_samples,
        MetricName.STALENESS: sum(lag * n for lag, n in staleness.items()) / max(1, sum(staleness.values())),
        MetricName.STALENESS_MAX: float(max(staleness, default=0)),
        MetricName.QUEUE_READY: float(replay.num_ready),
        MetricName.QUEUE_TAKEN: float(replay.num_taken),
        MetricName.QUEUE_BYTES: float(replay.num_bytes),
        MetricName.QUEUE_OLDEST_AGE_S: replay.oldest_age_s,
        MetricName.QUEUE_WAITING: float(replay.num_waiting),
        MetricName.QUEUE_OVERSIZED: float(replay.num_oversized),
    }


def staleness_of(groups: Sequence[ScoredGroup], *, trained_version: int) -> dict[int, int]:
    """Returns lag -> generated tokens; the lag of a token is `trained_version` minus the version that sampled it."""
    tokens: Counter[int] = Counter()
    for group in groups:
        for version, num_tokens in group.summary.tokens_by_version.items():
            tokens[trained_version - version] += num_tokens
    return dict(sorted(tokens.items()))


def component_means(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Returns each reward component's mean over the responses that have it."""
    totals: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for group in groups:
        for reward in group.scored_rewards:
            totals.update(reward.components)
            counts.update(reward.components.keys())
    return {name: totals[name] / counts[name] for name in totals}


def sampled_values(groups: Sequence[Sequence[Reward | None]], accuracy_component: str) -> dict[str, float]:
    """Returns means over all sampled groups, trained or rejected, and the shares of groups with equal rewards. `groups`
    has the rewards of each group; None for a response without a reward.

    A group with equal rewards is right or wrong by the component of accuracy; without it, by a reward above 0.
    """
    right = wrong = 0
    scored = [[reward for reward in group if reward is not None] for group in groups]
    for rewards in scored:
        if len({reward.value for reward in rewards}) == 1:
            marks = [r.components.get(accuracy_component, float(r.value > 0)) for r in rewards]
            is_right = math.fsum(marks) >= RIGHT_FROM * len(marks)
            right, wrong = right + is_right, wrong + (not is_right)
    every = [reward for rewards in scored for reward in rewards]
    marks = [reward.components[accuracy_component] for reward in every if accuracy_component in reward.components]
    return {
        MetricName.SAMPLED_REWARD_MEAN: math.fsum(reward.value for reward in every) / len(every),
        **({MetricName.SAMPLED_ACCURACY: math.fsum(marks) / len(marks)} if marks else {}),
        MetricName.NUM_SAMPLED_GROUPS: float(len(groups)),
        MetricName.UNSCORED_FRACTION: 1 - len(every) / sum(map(len, groups)),
        MetricName.UNIFORM_FRACTION: (right + wrong) / len(groups),
        MetricName.UNIFORM_RIGHT_FRACTION: right / len(groups),
        MetricName.UNIFORM_WRONG_FRACTION: wrong / len(groups),
    }


def correlations(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Returns Pearson correlations within groups, as the policy gradient sees them: `length` of the reward with the
    number of tokens, `NAME` of the reward with a component, `NAME/NAME` of two components. Columns that do not vary
    within any group have none."""
    columns: dict[str, list[float]] = {}
    rows = list(_centred_rows(groups))
    for name in dict.fromkeys(name for row in rows for name in row):
        columns[name] = [row[name] if name in row else 0.0 for row in rows]
    columns = {name: values for name, values in columns.items() if any(abs(value) > TINY for value in values)}
    if REWARD not in columns:
        return {}
    others = [name for name in columns if name != REWARD]
    found = {name: _cosine(columns[REWARD], columns[name]) for name in others}
    components = [name for name in others if name != LENGTH][:MAX_CORRELATED]
    return found | {f"{a}/{b}": _cosine(columns[a], columns[b]) for a, b in combinations(components, 2)}


def reasons_of(groups: Sequence[ScoredGroup]) -> Counter[str]:
    """Returns `component: reason` -> responses whose component is not above 0. Digits are replaced and reasons cut,
    so that few names occur."""
    return Counter(
        f"{name}: {_DIGITS.sub('#', reason)[:MAX_REASON]}"
        for group in groups
        for reward in group.scored_rewards
        for name, reason in reward.reasons.items()
        if name not in reward.components or reward.components[name] <= 0
    )


REWARD, LENGTH = "reward", "length"  # columns beside the components
RIGHT_FROM = 0.5
TINY = 1e-12
MAX_CORRELATED = 4  # components whose correlations with each other are kept
MAX_REASON = 60  # characters
_DIGITS = re.compile(r"\d+")


def _centred_rows(groups: Sequence[ScoredGroup]) -> Iterator[dict[str, float]]:
    """Yields reward, length and components of each scored response, less their means over its group."""
    for group in groups:
        rows = [
            {**reward.components, REWARD: reward.value, LENGTH: float(num_steps)}
            for reward, num_steps in zip(group.rewards, group.summary.num_steps, strict=True)
            if reward is not None
        ]
        names = dict.fromkeys(name for row in rows for name in row)
        means = {name: math.fsum(row.get(name, 0.0) for row in rows) / len(rows) for name in names}
        for row in rows:
            yield {name: value - means[name] for name, value in row.items()}


def _cosine(a: Sequence[float], b: Sequence[float]) -> float:
    left, right = np.array(a), np.array(b)
    return float(left @ right / math.sqrt((left @ left) * (right @ right)))


HELD_OUT = "held_out"  # the suite that gives the accuracy of the run
CONTENT = "sha256:"  # begins the digests in an identity
Counters = Mapping[str, Mapping[str, int]]  # counter -> reason -> count since the start of the run


@dataclass(frozen=True)
class StepRecord:
    """One finished step.

    `seconds` holds each timed phase, `total` and `other` (total less all phases); `staleness` maps a lag in versions to
    trained tokens; `components` maps a reward component to its mean; `counters` are cumulative; `correlations` are
    those of the function `correlations`.
    """

    step: int
    seconds: Mapping[str, float]
    values: Mapping[str, float]
    staleness: Mapping[int, int]
    components: Mapping[str, float]
    counters: Counters
    correlations: Mapping[str, float] = field(default_factory=dict)

    @property
    def version(self) -> int:
        """The weight version that the step made."""
        return self.step

    @property
    def accuracy(self) -> float | None:
        """Accuracy over all sampled responses; records of earlier versions have that of the trained ones."""
        return self.values.get(MetricName.SAMPLED_ACCURACY, self.values.get(MetricName.ACCURACY))

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of the parts of the step, `other` last; they sum to `total`."""
        return {name: s for name, s in self.seconds.items() if name != "total"}


@dataclass(frozen=True)
class ControlGain:
    """What the policy gains over one control on the `num` rows that both answered; [low, high] is the 95 % interval of
    the paired differences (`paired_interval`)."""

    control: str
    accuracy: float  # of the control
    gain: float
    low: float
    high: float
    num: int
    before: float | None = None  # accuracy of the control at the first version, of `direct_prompt` the policy's
    policy_before: float | None = None  # accuracy of the policy at the first version; None at that version

    @property
    def share(self) -> float | None:
        """The share of the policy's gain since the first version that the control has, too; None without a gain."""
        if self.before is None or self.policy_before is None:
            return None
        whole = self.accuracy + self.gain - self.policy_before
        return (self.accuracy - self.before) / whole if whole > 0 else None


def best_control(gains: Sequence[ControlGain]) -> ControlGain | None:
    """Returns the control over which the policy gains least; None without controls."""
    return min(gains, key=lambda each: each.gain, default=None)


@dataclass(frozen=True)
class EvaluationRecord:
    """Accuracy of one weight version on one suite of held-out prompts, with its 95 % interval.

    `values` holds further metrics: `pass_at_<k>`, `response_length` (tokens), `truncated` and ratios. The mean is over
    `num` responses; `num_unscored` more have no score. `identity` names what was measured, such as split, rows and
    sampling: numbers with different identities are not comparable. Records of earlier versions have none.
    """

    version: int
    accuracy: float
    low: float
    high: float
    num: int
    suite: str = HELD_OUT
    values: Mapping[str, float] = field(default_factory=dict)
    num_unscored: int = 0
    identity: Mapping[str, Any] = field(default_factory=dict)
    measure: str = "accuracy"  # what the mean is called: `score` if values are not 0 or 1, or the user's function
    controls: tuple[ControlGain, ...] = ()

    @property
    def counted(self) -> str:
        """The responses, or prompts, behind the mean: `4 prompts`, or `3 of 4 prompts`."""
        whole = self.num + self.num_unscored
        unit = "prompts" if self.identity.get("num_samples") == 1 else "responses"
        return f"{self.num} of {whole} {unit}" if self.num_unscored else f"{whole} {unit}"


@dataclass(frozen=True)
class BeforeAfter:
    """The first and the newest evaluation of a suite. If they measured different things, `before` is None and `reason`
    says what differs."""

    before: EvaluationRecord | None
    after: EvaluationRecord | None
    reason: str = ""

    @classmethod
    def of(cls, records: Sequence[EvaluationRecord]) -> BeforeAfter:
        if len(records) < 2:
            return cls(records[0] if records else None, None)
        first, last = records[0], records[-1]
        if first.identity == last.identity:
            return cls(first, last)
        changed = difference(first.identity, last.identity)
        return cls(None, last, f"version {first.version} was evaluated in another way: {changed}")


def distinct_identities(records: Iterable[EvaluationRecord]) -> list[Mapping[str, Any]]:
    """Returns the different identities of the records, in order."""
    return list({json.dumps(dict(record.identity), sort_keys=True): record.identity for record in records}.values())


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Names the parts of two identities that differ. Digests are named only if no other part differs."""
    if not old or not new:
        return "an earlier version of Mobula recorded no identity of the evaluation"
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    plain = [key for key in changed if not str(new.get(key, old.get(key))).startswith(CONTENT)]
    return ", ".join(f"{key} {old.get(key)} -> {new.get(key)}" for key in plain) or ", ".join(
        f"other {key.replace('_', ' ')}" for key in changed
    )


MetricsRecord = StepRecord | EvaluationRecord
_Reader = TypeAdapter[StepRecord] | TypeAdapter[EvaluationRecord]
_READERS: Mapping[str, _Reader] = {"step": TypeAdapter(StepRecord), "evaluation": TypeAdapter(EvaluationRecord)}


@dataclass(frozen=True)
class SampleRecord:
    """One response of a step for the report, with the images of its prompt as PNG."""

    step: int
    kind: str  # best, worst or random of its step
    prompt: str
    response: str
    references: tuple[str, ...]
    reward: float
    images: tuple[bytes, ...]


def to_line(record: MetricsRecord) -> str:
    """Formats a record as one line of strict JSON; non-finite numbers become the strings "nan", "inf" and "-inf"."""
    kind = "step" if isinstance(record, StepRecord) else "evaluation"
    return json.dumps({"kind": kind, **strict(asdict(record))}, allow_nan=False)


def from_line(line: str) -> MetricsRecord:
    """The inverse of `to_line`."""
    row = json.loads(line)
    kind = row.pop("kind")
    if kind not in _READERS:
        raise ValueError(f"a metrics line of kind {kind!r} is unknown: this file is not a metrics.jsonl of Mobula")
    return _READERS[kind].validate_python(row)


def strict(value: Any) -> Any:
    """Returns `value` for strict JSON: keys are strings, non-finite numbers are replaced by strings."""
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


class RunTotals:
    """The numbers of the summary. After a resume they are rebuilt from the records in `metrics.jsonl`."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.version = 0  # made by the newest step
        self.num_samples = 0
        self.num_tokens = 0
        self.optimizer_steps = 0
        self.over_age_tokens = 0
        self.media_bytes_referenced = 0
        self.seconds: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()
        self.last_values: dict[str, float] = {}
        self._gap_sum, self._gap_tokens = 0.0, 0
        self._maxima: dict[str, float] = {}
        self._evaluations: dict[tuple[int, str], EvaluationRecord] = {}

    def add(self, record: StepRecord) -> None:
        values = record.values
        self.num_steps += 1
        self.version = record.step
        self.num_samples += round(values[MetricName.NUM_SAMPLES])
        self.num_tokens += round(values[MetricName.NUM_TOKENS])
        # Records of some jobs and of earlier versions lack these.
        self.optimizer_steps += round(values.get(MetricName.OPTIMIZER_STEPS, 0))
        self.over_age_tokens += round(values.get(MetricName.OVER_AGE_TOKENS, 0))
        self.media_bytes_referenced += round(values.get(MetricName.MEDIA_BYTES_REFERENCED, 0))
        self.seconds.update(record.seconds)
        self.staleness.update(record.staleness)
        self.last_values.update(values)
        if MetricName.LOGPROB_GAP_MEAN in values:
            # A step without tokens of version lag 0 has a gap from a few fresh samples: it counts as one token.
            num_tokens = max(1, record.staleness.get(0, 0))
            self._gap_sum += values[MetricName.LOGPROB_GAP_MEAN] * num_tokens
            self._gap_tokens += num_tokens
        for name, value in values.items():
            known = self._maxima.setdefault(name, value)
            self._maxima[name] = float(np.maximum(known, value))  # NaN stays NaN: a broken number must not look good

    def add_evaluation(self, record: EvaluationRecord) -> None:
        """Adds an evaluation; it replaces an earlier result of the same version and suite."""
        self._evaluations[record.version, record.suite] = record

    @property
    def evaluations(self) -> Sequence[EvaluationRecord]:
        """Evaluations of the run's own held-out suite, oldest version first."""
        return [self._evaluations[key] for key in sorted(self._evaluations) if key[1] == HELD_OUT]

    def has_evaluation(self, record: EvaluationRecord) -> bool:
        """Whether an earlier part of the run made the same evaluation of this version."""
        known = self._evaluations.get((record.version, record.suite))
        return known is not None and known.identity == record.identity

    @property
    def logprob_gap_mean(self) -> float | None:
        """Mean over all trained tokens of version lag 0 and fresh samples; None without any."""
        return self._gap_sum / self._gap_tokens if self._gap_tokens else None

    def maximum(self, name: MetricName) -> float | None:
        """Returns the largest value over all steps; None if no step has one."""
        return self._maxima.get(name)

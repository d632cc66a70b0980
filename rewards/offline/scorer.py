"""Scores rows in batches by several processes and sums the scores up; their number does not change the result."""

from __future__ import annotations

import gc
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from heapq import nlargest, nsmallest
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

import msgspec

from mobula.cluster.errors import DeadlineError, PreflightError, RewardError, WorkerDiedError
from mobula.cluster.records.trajectory import Reward
from mobula.cluster.runtime.child_process import ChildProcess
from mobula.cluster.runtime.gc_tuning import tune_gc
from mobula.configs.schema.rewards import RewardsConfig
from mobula.rewards.components import ComponentError, RewardScoring
from mobula.rewards.contract import FailureKind, RewardRequest
from mobula.rewards.offline.rows import Batch, BrokenRowError, ImageFiles, Record, Source, read_row
from mobula.rewards.tools import Tools

_UNIT = 1 << 60  # sums are integers in units of 2**-60: they do not depend on the order of their terms
DIGITS = 6
MAX_BROKEN = 20  # invalid rows in the report; all are counted
RIGHT = 1.0  # smallest value of the accuracy component of a right response


@dataclass
class Mean:
    """The mean of numbers, exact until rounding."""

    num: int = 0
    sum_units: int = 0

    def add(self, values: Iterable[float]) -> None:
        for value, count in Counter(values).items():
            numerator, denominator = value.as_integer_ratio()
            self.num += count
            self.sum_units += count * (numerator * _UNIT // denominator)

    def merge(self, other: Mean) -> None:
        self.num += other.num
        self.sum_units += other.sum_units

    @property
    def value(self) -> float:
        return round(self.sum_units / (self.num * _UNIT), DIGITS) if self.num else 0.0


@dataclass
class ScoreSummary:
    """The results of some rows. Examples are sorted by total; ties are won by the earlier row."""

    num_records: int = 0
    num_broken: int = 0
    broken: list[tuple[int, str]] = field(default_factory=list)  # row, fault; the first ones
    unscored: Counter[str] = field(default_factory=Counter)  # component and kind of failure -> records
    total: Mean = field(default_factory=Mean)
    components: dict[str, Mean] = field(default_factory=dict)
    num_passed: int = 0
    num_right: int = 0
    num_in_words: int = 0  # records without a token count, whose length is a number of words
    num_right_below: int = 0  # right by the accuracy component, below the threshold by the total
    right_below: list[str | int] = field(default_factory=list)  # ids or rows of the first ones
    best: list[dict[str, Any]] = field(default_factory=list)
    worst: list[dict[str, Any]] = field(default_factory=list)

    def merge(self, other: ScoreSummary, top_k: int, max_ids: int) -> None:
        for name in ("num_records", "num_broken", "num_passed", "num_right", "num_right_below", "num_in_words"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.broken = [*self.broken, *other.broken][:MAX_BROKEN]
        self.unscored.update(other.unscored)
        self.total.merge(other.total)
        for name, mean in other.components.items():
            self.components.setdefault(name, Mean()).merge(mean)
        self.right_below = [*self.right_below, *other.right_below][:max_ids]
        self.best = sorted([*self.best, *other.best], key=lambda e: (-e["reward"], e["row"]))[:top_k]
        worst = sorted([*self.worst, *other.worst], key=lambda e: (-e["reward"], e["row"]))
        self.worst = worst[max(0, len(worst) - top_k) :]

    def report(self, accuracy_component: str, pass_threshold: float) -> dict[str, Any]:
        """Returns the figures by name; shares refer to the records with a score."""
        num = max(1, self.total.num)
        return {
            "num_records": self.num_records,
            "num_broken": self.num_broken,
            "broken": [{"row": row, "fault": fault} for row, fault in self.broken],
            "num_scored": self.total.num,
            "num_lengths_in_words": self.num_in_words,
            "unscored": dict(sorted(self.unscored.items())),
            "average_reward": self.total.value,
            "pass_threshold": pass_threshold,
            "pass_rate": round(self.num_passed / num, DIGITS),
            "component_averages": {name: mean.value for name, mean in self.components.items()},
            "accuracy": {
                "component": accuracy_component,
                "share_right": round(self.num_right / num, DIGITS),
                "num_right": self.num_right,
                "num_right_below_threshold": self.num_right_below,
                "right_below_threshold": self.right_below,
            },
            "best": self.best,
            "worst": self.worst,
        }


def shortened(values: Mapping[str, Any], max_chars: int) -> dict[str, Any]:
    """Shortens a text and appends the number of omitted characters."""
    return {
        name: f"{value[:max_chars]} [... {len(value) - max_chars} characters more]"
        if isinstance(value, str) and len(value) > max_chars
        else value
        for name, value in values.items()
    }


START_TIMEOUT_S = 120.0  # to import modules of reward functions; the deadline of the batch may be earlier
FUNCTION_SHARE, BATCH_SHARE = 1 / 20, 0.8  # of `timeout_s`
IMAGES = "images"  # component name in errors if the images of a record cannot be read
DEVICE, DTYPE = "cpu", "float32"  # of models; each process has a copy
MAX_TEXT_CHARS = 2000  # of a prompt or response in the report
MAX_REFERENCES = 10
GC_THRESHOLDS = 50_000, 20, 100  # records have no cycles; collecting every 700 objects takes a third of the time
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class ScoringOptions:
    """Reward functions, limits and thresholds of a scoring. Relative paths of images start in `folder`."""

    rewards: RewardsConfig
    folder: Path
    timeout_s: float
    pass_threshold: float
    top_k: int
    max_ids: int
    writes_rows: bool


@dataclass(frozen=True)
class ScoredBatch:
    """Results of a batch. `rows` has a line of JSON per record; `is_stuck`: a computation hangs in the process."""

    size: int
    summary: ScoreSummary
    rows: bytes
    is_stuck: bool


class RecordScorer:
    """Scores records like a run with these rewards; records that cannot be scored are counted by kind of failure. A
    batch has `timeout_s`. A hanging answer gets `FUNCTION_SHARE` of it and all answers together `BATCH_SHARE`, so that
    they are counted as timed out before the batch itself is late."""

    def __init__(self, options: ScoringOptions) -> None:
        """Raises `ValueError` if a function is unknown, or its options are invalid."""
        self._options = options
        self._needs_images = options.rewards.needs_images
        self._files = ImageFiles(options.folder)
        rewards, share_s = options.rewards, FUNCTION_SHARE * options.timeout_s
        self._tools = Tools.timed(rewards.processes, share_s, START_TIMEOUT_S, DEVICE, DTYPE)
        self._scoring = RewardScoring(rewards, None, self._tools)

    def score(self, batch: Batch) -> ScoredBatch:
        summary = ScoreSummary()
        numbers: list[int] = []
        records: list[Record] = []
        requests: list[RewardRequest | ComponentError] = []
        for number, row in enumerate(batch.rows, batch.first):
            if isinstance(row, bytes) and not row.strip():
                continue
            try:
                record = read_row(row)
            except BrokenRowError as error:
                summary.num_broken += 1
                if len(summary.broken) < MAX_BROKEN:
                    summary.broken.append((number, str(error)))
                continue
            numbers.append(number)
            records.append(record)
            requests.append(self._request(record))
        self._tools.end_at(time.monotonic() + BATCH_SHARE * self._options.timeout_s)
        scored = iter(self._scoring.rewards([r for r in requests if isinstance(r, RewardRequest)]))
        rewards: list[Reward | ComponentError] = [
            next(scored) if isinstance(request, RewardRequest) else request for request in requests
        ]
        self._count(summary, numbers, records, rewards)
        rows = b"".join(map(_line, numbers, records, rewards)) if self._options.writes_rows else b""
        return ScoredBatch(batch.size, summary, rows, self._tools.in_time.num_stuck > 0)

    def _request(self, record: Record) -> RewardRequest | ComponentError:
        try:
            return record.request(self._files.read, needs_images=self._needs_images)
        except RewardError as error:
            return ComponentError(IMAGES, FailureKind.FAILED, str(error))

    def _count(
        self,
        summary: ScoreSummary,
        numbers: Sequence[int],
        records: Sequence[Record],
        rewards: Sequence[Reward | ComponentError],
    ) -> None:
        options, accuracy = self._options, self._options.rewards.accuracy_component
        totals: dict[int, float] = {}  # index -> total of a scored record
        values: dict[str, list[float]] = {component.name: [] for component in options.rewards.components}
        for index, reward in enumerate(rewards):
            if isinstance(reward, ComponentError):
                summary.unscored[f"{reward.component}: {reward.kind}"] += 1
                continue
            total = totals[index] = round(reward.value, DIGITS)
            for name, value in reward.components.items():
                values[name].append(value)
            is_passed = total >= options.pass_threshold
            is_right = reward.components.get(accuracy, 0.0) >= RIGHT
            summary.num_passed += is_passed
            summary.num_right += is_right
            if is_right and not is_passed:
                summary.num_right_below += 1
                if len(summary.right_below) < options.max_ids:
                    id_ = records[index].id
                    summary.right_below.append(numbers[index] if id_ is None else id_)
        summary.num_records = len(rewards)
        summary.num_in_words = sum(not record.has_token_count for record in records)
        summary.total.add(totals.values())
        for name, scores in values.items():
            summary.components[name] = Mean()
            summary.components[name].add(scores)
        best = nsmallest(options.top_k, totals, key=lambda index: (-totals[index], index))
        worst = nlargest(options.top_k, totals, key=lambda index: (-totals[index], index))[::-1]
        shown = {index: _example(numbers[index], records[index], rewards[index]) for index in {*best, *worst}}
        summary.best, summary.worst = [shown[index] for index in best], [shown[index] for index in worst]


def _result(number: int, record: Record, reward: Reward | ComponentError) -> dict[str, Any]:
    name = {"row": number, "id": record.id}
    if isinstance(reward, ComponentError):
        return {**name, "unscored": f"{reward.component}: {reward.kind}", "reason": reward.reason}
    return {**name, "reward": round(reward.value, DIGITS), "components": reward.components}


def _line(number: int, record: Record, reward: Reward | ComponentError) -> bytes:
    return _encode(_result(number, record, reward)) + b"\n"


def _example(number: int, record: Record, reward: Reward | ComponentError) -> dict[str, Any]:
    texts = shortened({"prompt": record.prompt, "response": record.text}, MAX_TEXT_CHARS)
    reasons = dict(reward.reasons) if isinstance(reward, Reward) else {}
    references = list(record.references[:MAX_REFERENCES])
    return {**_result(number, record, reward), "reasons": reasons, **texts, "references": references}


_scorer: list[RecordScorer] = []  # at most one, the scorer of this process


def start(options: ScoringOptions) -> None:
    try:
        with ThreadPoolExecutor(1) as thread:  # a forked child hangs in OpenMP that its parent's main thread used
            _scorer.append(thread.submit(RecordScorer, options).result())
    except ValueError as error:
        raise PreflightError(str(error)) from error
    tune_gc()
    gc.set_threshold(*GC_THRESHOLDS)


def score(batch: Batch) -> ScoredBatch:
    return _scorer[0].score(batch)


LEAST_ROWS, MOST_ROWS = 64, 4096  # of one batch
SHORT_S, LONG_S = 1.0, 5.0  # after a shorter batch sizes double, after a longer batch they restart at LEAST_ROWS
AHEAD = 3  # batches per process that may be pending, because results are yielded in order
BUILD_TIMEOUT_S = 300.0  # to import and build the reward functions


def score_source(
    source: Source,
    options: ScoringOptions,
    *,
    num_processes: int,
    is_strict: bool = False,
    rows: BinaryIO | None = None,
    on_progress: Callable[[int], None] = lambda size: None,
) -> ScoreSummary:
    """Returns the summary of all records, in constant memory. Writes the result of each record to `rows`, in order."""
    whole = ScoreSummary()
    try:
        for scored in _in_order(source, options, num_processes):
            if rows is not None:
                rows.write(scored.rows)
            whole.merge(scored.summary, options.top_k, options.max_ids)
            if is_strict and whole.num_broken:
                row, fault = whole.broken[0]
                raise PreflightError(f"{source.path}, row {row}: {fault}; fix it, or leave out --strict to skip it")
            on_progress(scored.size)
    except OSError as error:
        if isinstance(error, DeadlineError):
            raise
        raise PreflightError(f"{source.path} cannot be read ({error}): give a whole file") from error
    return whole


def _in_order(source: Source, options: ScoringOptions, num_processes: int) -> Iterator[ScoredBatch]:
    children = [ChildProcess() for _ in range(num_processes)]
    idle: SimpleQueue[ChildProcess] = SimpleQueue()
    for child in children:
        idle.put(child)
    num_rows = LEAST_ROWS

    def run(batch: Batch) -> ScoredBatch:
        nonlocal num_rows
        child = idle.get()
        rows = f"rows {batch.first:,} to {batch.first + len(batch.rows) - 1:,} of {source.path}"
        try:
            if not child.is_running:
                child.call(BUILD_TIMEOUT_S, start, options)
            started = time.monotonic()
            scored = child.call(options.timeout_s, score, batch)
            seconds = time.monotonic() - started
            if not SHORT_S <= seconds < LONG_S:
                num_rows = min(2 * num_rows, MOST_ROWS) if seconds < SHORT_S else LEAST_ROWS
            if scored.is_stuck:
                child.close()  # a hanging thread cannot be killed; the next batch starts a new process
            return scored
        except DeadlineError as error:
            raise DeadlineError(
                f"{rows} took longer than {options.timeout_s:g} s: look for what hangs there"
            ) from error
        except WorkerDiedError as error:
            reason = "it ran out of memory or was killed, try again with fewer processes"
            raise WorkerDiedError(f"{rows}: {error}; {reason}") from error
        finally:
            idle.put(child)

    pending: deque[Future[ScoredBatch]] = deque()
    with ThreadPoolExecutor(num_processes) as threads:
        try:
            for batch in source.batches(lambda: num_rows):
                pending.append(threads.submit(run, batch))
                if len(pending) > AHEAD * num_processes:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
            for child in children:
                child.kill()  # ends the waits of the threads
    for child in children:
        child.close()

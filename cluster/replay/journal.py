"""Journal of groups in segments: what a resume repeats."""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mobula.cluster.errors import JournalError
from mobula.cluster.files import flush, sync
from mobula.cluster.records.arrow import SCHEMA, RecordedGroup, arrays, from_batch, record_batch, to_batch
from mobula.cluster.records.trajectory import GroupOutcome, Reward, TrajectoryGroup
from mobula.cluster.replay.run_identity import DATA_PATH, run_identity, same_identity
from mobula.configs.schema import RunConfig

_logger = logging.getLogger(__name__)

# Segments: the files of a journal. Each is an Arrow IPC stream of records with checksums.
#
# A record is one record batch with a kind, a small JSON body and a checksum in its metadata, so any Arrow reader can
# read a segment. `read_segment` returns only the records before the first damaged byte.

_IDENTITY = b"identity"  # key in the schema's metadata: the run's identity, as JSON
_SUFFIX = ".arrows"
_BUFFER_BYTES = 2**18  # of unsynced data: Arrow writes a record in a hundred pieces
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"  # end of a closed segment


class RecordKind(StrEnum):
    """Kinds of records."""

    FINISHED = "finished"  # a group that will be trained; one row per trajectory
    REJECTED = "rejected"  # a group that will not be trained
    TRAINED = "trained"  # groups that make a version; rows hold the reference log-probs, if any
    EVALUATED = "evaluated"  # results and rewards of the held-out evaluation of a version
    RESUMED = "resumed"  # version and groups from which the run resumed: voids all else recorded before


@dataclass(frozen=True)
class JournalRecord:
    """One record of a journal."""

    kind: RecordKind
    body: Mapping[str, Any]
    rows: pa.RecordBatch

    @property
    def group_id(self) -> str:
        """Of a finished or rejected group."""
        return self.body["group_id"]

    @property
    def reason(self) -> str | None:
        """Why the group was rejected; None of a finished one."""
        return self.body.get("reason")

    def group(self) -> RecordedGroup:
        """Reads a finished group."""
        return from_batch(self.rows)

    def outcome(self) -> GroupOutcome:
        """Returns a finished or rejected group as observers see it."""
        if self.kind is RecordKind.FINISHED:
            found = self.rows.column("reward").to_pylist(maps_as_pydicts="strict")
            num_tokens = sum(int(mask.sum()) for mask in arrays(self.rows, "action_mask") if mask is not None)
            rewards = tuple(Reward(**reward) for reward in found if reward is not None)
            return GroupOutcome(self.group_id, rewards, self.rows.num_rows, num_tokens)
        values = {key: value for key, value in self.body.items() if key not in ("reason", "rewards")}
        return GroupOutcome(**values, rewards=tuple(Reward(**reward) for reward in self.body.get("rewards", ())))


@dataclass(frozen=True)
class Segment:
    """The content of one file; the last `num_torn_bytes` bytes are damaged or incomplete."""

    number: int
    identity: Mapping[str, Any]
    records: tuple[JournalRecord, ...]
    num_torn_bytes: int


class SegmentWriter:
    """Appends records to one new file. `sync` returns once they are on disk."""

    def __init__(self, folder: Path, number: int, identity: Mapping[str, Any]) -> None:
        self.number = number
        self._file = segment_path(folder, number).open("xb")
        schema = SCHEMA.with_metadata({_IDENTITY: json.dumps(identity, sort_keys=True)})
        self._stream = pa.output_stream(self._file, buffer_size=_BUFFER_BYTES)
        self._writer = pa.ipc.new_stream(self._stream, schema)
        sync(folder)

    @property
    def num_bytes(self) -> int:
        return self._stream.tell()

    def write(self, record: JournalRecord) -> None:
        body = json.dumps(record.body)
        checksum = _checksum(record.kind.value, body, record.rows)
        metadata = {"kind": record.kind.value, "body": body, "checksum": str(checksum)}
        self._writer.write_batch(record.rows, custom_metadata=metadata)

    def sync(self) -> None:
        self._stream.flush()  # to the file, which has its own buffer
        flush(self._file)

    def close(self) -> None:
        self._writer.close()
        self.sync()
        self._stream.close()

    def abandon(self) -> None:
        """Closes the file after a failed write. No record may follow an incomplete one."""
        with suppress(OSError):  # closing writes buffered bytes, which may fail again
            self._stream.close()


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}{_SUFFIX}"


def segment_numbers(folder: Path) -> list[int]:
    """Returns the numbers of the segments in `folder`, oldest first."""
    return sorted(int(path.stem) for path in folder.glob(f"*{_SUFFIX}"))


def read_segment(folder: Path, number: int) -> Segment:
    """Returns the intact records. Their rows are memory-mapped and read on access."""
    path = segment_path(folder, number)
    size = path.stat().st_size
    if size == 0:
        return Segment(number, {}, (), 0)
    with pa.memory_map(str(path)) as file:
        try:
            reader = pa.ipc.open_stream(file)
            if not reader.schema.equals(SCHEMA):
                raise ValueError("its columns are not those of this version")
            identity = json.loads(reader.schema.metadata[_IDENTITY])
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError):
            return Segment(number, {}, (), size)
        records, end = [], file.tell()
        for record in _records(reader):
            records.append(record)
            end = file.tell()
        file.seek(end)
        rest = file.read()
        return Segment(number, identity, tuple(records), 0 if rest == _END_OF_STREAM else len(rest))


def _records(reader: pa.RecordBatchStreamReader) -> Iterator[JournalRecord]:
    while True:
        try:
            batch, metadata = reader.read_next_batch_with_custom_metadata()
            batch.validate(full=True)
            kind, body = metadata[b"kind"].decode(), metadata[b"body"].decode()
            if int(metadata[b"checksum"]) != _checksum(kind, body, batch):
                raise ValueError("a record's checksum is wrong")
            record = JournalRecord(RecordKind(kind), json.loads(body), batch)
        except (StopIteration, pa.ArrowException, OSError, ValueError, KeyError, TypeError):
            return
        yield record


def _checksum(kind: str, body: str, rows: pa.RecordBatch) -> int:
    return zlib.crc32(rows.serialize(), zlib.crc32(f"{kind}{body}".encode()))


# Journal: append-only record on disk of the groups and steps since the last checkpoint.
#     journal/000000.arrows, 000001.arrows, ...     segments, see `mobula.cluster.replay.journal`
# The journal records finished groups, the groups of each trained step, rejected groups, evaluations, and the version
# from which the run resumed after a kill. Steps are replayed from the journal. It holds the groups without images,
# which are rebuilt from the data. Segments that a checkpoint covers are removed, oldest first.
#
# One process writes. Other processes may read only before its first append.

SEGMENT_BYTES = 16 * 2**20
Seconds = Mapping[str, float]  # by phase of a step
NO_SECONDS: Seconds = {}
_NO_ROWS = record_batch([])
_NOT_IDENTITY = {"tokens_per_microbatch", "max_concurrent_groups"}  # they change only speed and rounding


def journal_identity(config: RunConfig) -> dict[str, Any]:
    """Returns the settings on which recorded groups and updates depend, as JSON. A journal with another identity is
    not continued."""
    return {
        **run_identity(config),
        "num_steps": config.num_steps,
        "algorithm": config.algorithm.model_dump(mode="json", exclude=_NOT_IDENTITY),
        "learner": config.learner.model_dump(mode="json", exclude=_NOT_IDENTITY),
        "rewards": config.rewards.model_dump(mode="json"),
        "sampler.temperature": config.sampler.temperature,
        "sampler.max_tokens": config.sampler.max_tokens,
    }


def finished(group: TrajectoryGroup, rewards: Sequence[Reward | None]) -> JournalRecord:
    """Builds the record of an accepted group, which will be trained."""
    return JournalRecord(RecordKind.FINISHED, {"group_id": group.group_id}, to_batch(group, rewards))


def rejected(outcome: GroupOutcome, reason: str) -> JournalRecord:
    return JournalRecord(RecordKind.REJECTED, {**asdict(outcome), "reason": reason}, _NO_ROWS)


def evaluated(version: int, evaluation: Mapping[str, Any]) -> JournalRecord:
    return JournalRecord(RecordKind.EVALUATED, {"version": version, "evaluation": evaluation}, _NO_ROWS)


def trained(
    version: int,
    group_ids: Sequence[str],
    logprobs: Sequence[Sequence[np.ndarray] | None],
    seconds: Seconds = NO_SECONDS,
) -> JournalRecord:
    """Records that these groups, in this order, make `version`; `logprobs`: reference log-probs per group, or None;
    `seconds`: phases of the step before its update."""
    rows = [
        {"group_id": group_id, "reference_logprobs": of_trajectory}
        for group_id, of_group in zip(group_ids, logprobs, strict=True)
        for of_trajectory in of_group or ()
    ]
    body = {"version": version, "group_ids": list(group_ids), "seconds": dict(seconds)}
    return JournalRecord(RecordKind.TRAINED, body, record_batch(rows))


def resumed(version: int, group_ids: Sequence[str]) -> JournalRecord:
    """Records a resume from `version` with these finished groups. Voids later steps and other untrained groups."""
    return JournalRecord(RecordKind.RESUMED, {"version": version, "group_ids": list(group_ids)}, _NO_ROWS)


@dataclass(frozen=True)
class TrainedStep:
    """The groups that made a version, in training order."""

    version: int
    groups: tuple[JournalRecord, ...]
    rows: pa.RecordBatch  # reference log-probs
    arrivals: tuple[JournalRecord, ...] = ()  # groups finished or rejected since the step before, in order
    seconds: Seconds = field(default_factory=dict)  # before the update

    @property
    def group_ids(self) -> tuple[str, ...]:
        return tuple(group.group_id for group in self.groups)

    def read(self) -> list[RecordedGroup]:
        """Returns the groups with the reference log-probs of their training."""
        groups = [record.group() for record in self.groups]
        if self.rows.num_rows == 0:
            return groups
        logprobs = (array for array in arrays(self.rows, "reference_logprobs") if array is not None)  # none is missing
        return [
            replace(recorded, reference_logprobs=tuple(next(logprobs) for _ in recorded.group.trajectories))
            for recorded in groups
        ]


@dataclass(frozen=True)
class Recovered:
    """The content of a journal beyond the checkpoint of `version`. Groups are read on access."""

    version: int
    steps: tuple[TrainedStep, ...] = ()  # after `version`, without a gap
    finished: tuple[JournalRecord, ...] = ()  # not trained in these steps or before, in order of completion
    rejected: tuple[str, ...] = ()
    arrivals: tuple[JournalRecord, ...] = ()  # since the last step, in order
    evaluations: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)  # by version
    num_torn: int = 0  # segments with a damaged or incomplete end

    @property
    def reached(self) -> int:
        """The version after the last step."""
        return self.version + len(self.steps)

    def without_last_step(self) -> Recovered:
        """Returns the content with the groups of the last step finished and not trained yet."""
        *steps, last = self.steps
        arrivals = (*last.arrivals, *self.arrivals)
        return replace(self, steps=tuple(steps), finished=(*last.groups, *self.finished), arrivals=arrivals)


class Journal:
    """The journal of one run in `folder`. Accesses the disk on first use."""

    def __init__(self, folder: Path, identity: Mapping[str, Any], *, segment_bytes: int = SEGMENT_BYTES) -> None:
        """`identity` is `journal_identity(config)`. A new segment begins after `segment_bytes`."""
        self.folder = folder
        self._identity = json.loads(json.dumps(identity))  # in the form read from a file
        self._segment_bytes = segment_bytes
        self._held: _Held | None = None
        self._writer: SegmentWriter | None = None

    def recover(self, version: int) -> Recovered:
        """Returns the complete content with this identity after the checkpoint of `version`."""
        return self._ledger(resumed_from=version).beyond(version)

    def read(self, group_ids: Iterable[str]) -> dict[str, RecordedGroup]:
        """Returns the groups found on disk. Trained groups have the reference log-probs of their training."""
        return self._ledger().read(set(group_ids))

    def append(self, records: Sequence[JournalRecord]) -> None:
        """Writes records in order and waits until they are on disk. Skips groups that are already on disk."""
        try:
            held = self._opened()
            for record in records:
                if not held.knows(record):
                    self._write(record)
            if self._writer is not None:
                self._writer.sync()
        except OSError as error:
            if self._writer is not None:
                self._writer.abandon()
            # The write may have stopped in the middle of a record.
            self._writer = self._held = None  # the next use reads the files again
            raise JournalError(
                f"the journal below {self.folder} cannot be written: {error}; free the disk, then go on with "
                "resume=auto, or set replay.journal=false"
            ) from error

    def forget(self, version: int) -> None:
        """Removes the oldest segments that the complete checkpoint of `version` covers."""
        held = self._opened()
        for number in held.done_with(version):
            if self._writer is not None and number == self._writer.number:
                return
            segment_path(self.folder, number).unlink(missing_ok=True)
            held.drop(number)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _opened(self) -> _Held:
        if self._held is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._held = _Held()
            for segment in self._segments():
                self._held.open(segment.number)
                for record in _of_identity(segment.records, is_ours=self._is_ours(segment)):
                    self._held.add(record)
        return self._held

    def _write(self, record: JournalRecord) -> None:
        held = self._opened()
        if self._writer is not None and self._writer.num_bytes >= self._segment_bytes:
            self._writer.close()
            self._writer = None
        if self._writer is None:
            number = held.newest + 1
            self._writer = SegmentWriter(self.folder, number, self._identity)
            held.open(number)
        self._writer.write(record)
        held.add(record)

    def _ledger(self, *, resumed_from: int | None = None) -> _Ledger:
        """Reads the journal; logs what a resume from the version `resumed_from` loses."""
        ledger = _Ledger()
        for segment in self._segments():
            if resumed_from is not None:
                self._tell_of_losses(segment, resumed_from)
            for record in _of_identity(segment.records, is_ours=self._is_ours(segment)):
                ledger.apply(record)
            ledger.num_torn += segment.num_torn_bytes > 0
        return ledger

    def _segments(self) -> Iterator[Segment]:
        return (read_segment(self.folder, number) for number in segment_numbers(self.folder))

    def _is_ours(self, segment: Segment) -> bool:
        return self._same(segment.identity) == self._same(self._identity)

    @staticmethod
    def _same(identity: Mapping[str, Any]) -> dict[str, Any]:
        """Without the folder of the data, whose content was compared with that of the checkpoint."""
        return {key: value for key, value in same_identity(identity).items() if key != DATA_PATH}

    def _tell_of_losses(self, segment: Segment, version: int) -> None:
        path, was = segment_path(self.folder, segment.number), segment.identity
        if segment.num_torn_bytes:
            _logger.warning("%s: its last %d bytes are not whole and are left out", path, segment.num_torn_bytes)
        if not was or self._is_ours(segment):
            return
        steps = [record for record in segment.records if record.kind is RecordKind.TRAINED]
        old = {group_id for step in steps if step.body["version"] <= version for group_id in _ids(step)}
        finished = {record.group_id for record in segment.records if record.kind is RecordKind.FINISHED}
        if num_lost := len(finished - old):
            keys = sorted(was.keys() | self._identity.keys())
            then, now = self._same(was), self._same(self._identity)
            changed = [key for key in keys if then.get(key) != now.get(key)]
            text = "%s has %d finished groups, which are sampled again: it was written with another %s"
            _logger.warning(text, path, num_lost, ", ".join(changed))


@dataclass
class _Ledger:
    """State of the journal after its records, applied in order."""

    finished: dict[str, JournalRecord] = field(default_factory=dict)
    rejected: dict[str, None] = field(default_factory=dict)
    steps: dict[int, JournalRecord] = field(default_factory=dict)
    evaluations: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    arrivals: dict[tuple[str, RecordKind], tuple[int, JournalRecord]] = field(default_factory=dict)  # with their place
    places: dict[int, int] = field(default_factory=dict)  # version made -> place of its step among all records
    num_records: int = 0
    num_torn: int = 0

    def beyond(self, version: int) -> Recovered:
        steps: list[TrainedStep] = []
        since = 0
        while (made := version + len(steps) + 1) in self.steps and self._is_whole(self.steps[made]):
            arrivals, seconds = self._arrived(since, self.places[made]), self.steps[made].body.get("seconds", {})
            steps.append(replace(self._step(made), arrivals=arrivals, seconds=seconds))
            since = self.places[made]
        settled = {group_id for made in self.steps if made <= version for group_id in _ids(self.steps[made])}
        settled.update(group_id for step in steps for group_id in step.group_ids)
        settled.update(self.rejected)  # a finished group may be rejected later
        return Recovered(
            version=version,
            steps=tuple(steps),
            finished=tuple(record for group_id, record in self.finished.items() if group_id not in settled),
            rejected=tuple(self.rejected),
            arrivals=self._arrived(since, self.num_records),
            evaluations=self.evaluations,
            num_torn=self.num_torn,
        )

    def read(self, group_ids: set[str]) -> dict[str, RecordedGroup]:
        groups = {group_id: record.group() for group_id, record in self.finished.items() if group_id in group_ids}
        for version, record in self.steps.items():
            if group_ids.intersection(_ids(record)) and self._is_whole(record):
                step = self._step(version).read()
                groups.update({group.group.group_id: group for group in step if group.group.group_id in group_ids})
        return groups

    def apply(self, record: JournalRecord) -> None:
        self.num_records += 1
        if record.kind in (RecordKind.FINISHED, RecordKind.REJECTED):
            self.arrivals.setdefault((record.group_id, record.kind), (self.num_records, record))
        match record.kind:
            case RecordKind.FINISHED:
                self.finished[record.group_id] = record
            case RecordKind.REJECTED:
                self.rejected[record.group_id] = None
            case RecordKind.TRAINED:
                self.steps[record.body["version"]] = record
                self.places[record.body["version"]] = self.num_records
            case RecordKind.EVALUATED:
                self.evaluations[record.body["version"]] = record.body["evaluation"]
            case RecordKind.RESUMED:
                self._void(record.body["version"], _ids(record))

    def _void(self, version: int, kept: Iterable[str]) -> None:
        self.steps = {made: step for made, step in self.steps.items() if made <= version}
        used = {*kept, *(group_id for step in self.steps.values() for group_id in _ids(step))}
        self.finished = {group_id: record for group_id, record in self.finished.items() if group_id in used}
        self.arrivals = {
            key: value for key, value in self.arrivals.items() if key[0] in used or key[1] is RecordKind.REJECTED
        }
        self.evaluations = {made: found for made, found in self.evaluations.items() if made <= version}
        self.num_torn = 0  # reported at that resume

    def _arrived(self, start: int, end: int) -> tuple[JournalRecord, ...]:
        """Returns the groups that were finished or rejected between two places, in order."""
        return tuple(record for place, record in self.arrivals.values() if start < place <= end)

    def _is_whole(self, step: JournalRecord) -> bool:
        return all(group_id in self.finished for group_id in _ids(step))

    def _step(self, version: int) -> TrainedStep:
        record = self.steps[version]
        return TrainedStep(version, tuple(self.finished[group_id] for group_id in _ids(record)), record.rows)


class _Held:
    """Maps groups and versions to segments, to find removable segments. Segments are opened in order of number."""

    def __init__(self) -> None:
        self._segments: dict[int, set[str]] = {}  # number -> finished groups in the segment
        self._versions: dict[str, int] = {}  # finished group -> version whose step trained it
        self._marks: dict[int, int] = {}  # version -> segment of its training or resume record

    @property
    def newest(self) -> int:
        return max(self._segments, default=-1)

    def open(self, number: int) -> None:
        self._segments[number] = set()

    def knows(self, record: JournalRecord) -> bool:
        """Whether the record is of a finished group that is already on disk."""
        if record.kind is not RecordKind.FINISHED:
            return False
        return any(record.group_id in groups for groups in self._segments.values())

    def add(self, record: JournalRecord) -> None:
        match record.kind:
            case RecordKind.FINISHED:
                self._segments[self.newest].add(record.group_id)
            case RecordKind.TRAINED:
                self._versions.update(dict.fromkeys(_ids(record), record.body["version"]))
                self._marks[record.body["version"]] = self.newest
            case RecordKind.RESUMED:
                self._void(record.body["version"], set(_ids(record)))
            case RecordKind.REJECTED | RecordKind.EVALUATED:
                pass  # needed until a later checkpoint: see `done_with`

    def done_with(self, version: int) -> list[int]:
        """Returns the segments that a checkpoint of `version` covers, oldest first.

        They end before the step that made `version`, so the checkpoint covers their rejected groups too.
        """
        done: list[int] = []
        for number in sorted(self._segments):
            if version not in self._marks or number >= self._marks[version]:
                break
            if any(group not in self._versions or self._versions[group] > version for group in self._segments[number]):
                break
            done.append(number)
        return done

    def drop(self, number: int) -> None:
        for group_id in self._segments.pop(number):
            self._versions.pop(group_id, None)
        self._marks = {version: mark for version, mark in self._marks.items() if mark > number}

    def _void(self, version: int, kept: set[str]) -> None:
        self._versions = {group: made for group, made in self._versions.items() if made <= version}
        for number, groups in self._segments.items():
            self._segments[number] = {group for group in groups if group in kept or group in self._versions}
        self._marks = {made: mark for made, mark in self._marks.items() if made < version}
        self._marks[version] = self.newest


def _of_identity(records: Sequence[JournalRecord], *, is_ours: bool) -> Sequence[JournalRecord]:
    """Drops records of a run with other settings, except resumes, which void earlier records."""
    return records if is_ours else [record for record in records if record.kind is RecordKind.RESUMED]


def _ids(record: JournalRecord) -> Sequence[str]:
    return record.body["group_ids"]

"""History: the records of a chain, replayed in order, and its statements: staleness of tokens, groups trained once, the
fate of each prompt, verified pushes, and the comparison with another run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from mobula.cluster.audit.chain import (
    AUDIT_FILE,
    AuditFinding,
    AuditKind,
    AuditRecord,
    ChainFile,
    is_growing,
    is_segment,
)
from mobula.cluster.workers.faults import Fault

MAX_NAMED = 5  # groups in one message
UNKNOWN_BOUNDS: Mapping[str, Any] = {"max_staleness": None, "stragglers": "wait"}
SETTLED = "settled by the journal"  # reason of prompts rejected after the newest record of a killed part
# `newer`: the engine joined during the push, or got a later version, each through a load that checks every byte.
VERIFIED = ("checksum", "checksum+canary", "newer")
POLICY = "policy/"  # the trained policy in the run folder


@dataclass
class Part:
    """One process's part of a run, from its start to its end or kill."""

    started: AuditRecord | None  # None: its first record is missing or damaged
    label: str = ""  # run, version, commit and seed
    is_accepted: bool = False  # `config.yaml` is that of this part
    resumed_from: int | None = None  # version of the checkpoint; None for a new run
    recovered_to: int | None = None  # after the steps of the journal
    status: str | None = None  # None: it was killed, or goes on
    losses: list[Mapping[str, Any]] = field(default_factory=list)
    num_restored: int = 0  # restarts of the learner ranks
    bounds: Mapping[str, Any] = field(default_factory=lambda: UNKNOWN_BOUNDS)


@dataclass(frozen=True)
class Cover:
    """The newest digest that the chain has of a file: of the whole, or of the first bytes of one that grows."""

    record: AuditRecord
    num_bytes: int
    sha256: str
    is_whole: bool
    instead: Cover | None = None  # the content if the process was killed between this record and its file
    earlier: Cover | None = None  # of fewer bytes, from an earlier part


@dataclass
class AuditedStep:
    """A step of the run's line of versions."""

    record: AuditRecord
    groups: Mapping[str, str]  # id -> digest of content and rewards
    tokens: Mapping[str, Mapping[int, int]]  # id -> version that sampled them -> tokens
    part: int
    bounds: Mapping[str, Any]
    num_repeats: int = 0


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint and the part of the run that wrote it."""

    record: AuditRecord
    part: int


@dataclass(frozen=True)
class Descent:
    """What the weights of a version were made of: `steps` were trained on the checkpoint of version `base`, in order. A
    rollback leaves out the steps whose weights it replaced."""

    base: int
    steps: tuple[int, ...]


class History:
    """Replays records. `steps` is the line of versions that led to the newest one: each version once."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.steps: dict[int, AuditedStep] = {}
        self.void: dict[int, AuditedStep] = {}  # steps of earlier parts that a resume or a rollback left behind, newest
        self.num_void = 0
        self.num_remade = 0  # void steps that were trained again from the same groups
        self.checkpoints: dict[int, SavedCheckpoint] = {}
        self.pushes: list[AuditRecord] = []
        self.receipts: dict[str, Counter[str]] = defaultdict(Counter)  # engine -> how verified -> pushes
        self.num_admitted: Counter[str] = Counter()  # by engine
        self.served: set[int] = set()  # versions that engines have received
        self.rejected: Counter[str] = Counter()  # reason -> groups
        self.part_of: dict[str, int] = {}  # prompt -> newest part that handed it out or continued it
        self.reasons: dict[str, str] = {}  # rejected prompt -> reason
        self.regenerated: dict[str, str] = {}  # group -> source
        self.guarded: dict[int, AuditRecord] = {}  # actions of the guard by the version of their step
        self.rollbacks: dict[int, AuditRecord] = {}  # by the version whose weights they replaced
        self._void_rollbacks: dict[int, AuditRecord] = {}
        self.metrics: list[AuditRecord] = []  # of the newest part
        self.covers: dict[str, Cover] = {}  # file of the run folder -> its newest digest
        self.droppable: set[str] = set()  # segments of the journal that may be removed since the newest checkpoint
        self.logged: dict[int, AuditRecord] = {}
        self.ended: AuditRecord | None = None  # if it is the newest record
        self.findings: list[AuditFinding] = []

    @property
    def version(self) -> int:
        return max(self.steps, default=0)

    @property
    def trained(self) -> list[str]:
        """The groups of all steps, in order."""
        return [group_id for step in self.steps.values() for group_id in step.groups]

    def add(self, record: AuditRecord) -> None:
        """Applies the next record. A record of an unknown kind changes nothing."""
        self.ended = None
        if not self.parts and record.kind != AuditKind.STARTED:
            self.parts.append(Part(None))
            self._find(f"{record.name} stands before the start of the run")
        try:
            if record.kind in REPLAY:
                apply, fields = REPLAY[record.kind]
                for name, kind in fields.items():
                    if not isinstance(record.body[name], kind):
                        raise TypeError(f"{name} is {type(record.body[name]).__name__}")
                    if kind is int:
                        _integers(record.body[name])
                _integers(*record.body.get("kept", ()))
                apply(self, record)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            self._find(f"{record.name} is not as this version writes it ({type(error).__name__}: {error})")

    def _find(self, message: str) -> None:
        self.findings.append(AuditFinding(AUDIT_FILE, message))

    def _started(self, record: AuditRecord) -> None:
        self.parts.append(Part(None))  # stays if the record is not as expected
        self.metrics = []
        body, found = record.body, record.body["found"]
        code, bounds = body["code"], {key: body["bounds"][key] for key in UNKNOWN_BOUNDS}
        if bounds["max_staleness"] is not None:
            _integers(bounds["max_staleness"])
        _integers(found["torn_bytes"], found["num_records"], body["metrics"]["num_lines"])
        label = f"run {body['run']}, mobula {code['version']} {code['commit'][:12]}, seed {body['seed']}"
        # Compares the files that the new part found with the digests of earlier parts, and goes on from them.
        covers = _covers(record, body.get("files", {}))
        for name, cover in covers.items():
            known = self.covers.get(name)
            expected = [each.sha256 for each in (known, known and known.instead) if each is not None]
            if known is not None and cover.is_whole and cover.sha256 not in expected:
                self._find(f"when {cover.record.name} was written, {name} was not as {known.record.name} has it")
            elif known is not None and not cover.is_whole:
                covers[name] = replace(cover, earlier=replace(known, is_whole=False))
        self.covers = {name: cover for name, cover in self.covers.items() if not cover.is_whole} | covers
        self._release_segments()
        self.parts[-1] = Part(record, label, bounds=bounds)
        if found["head"] is not None:
            num = found["num_records"]
            self._find(
                f"when {record.name} was written, the chain had {num} records and audit.head said {found['head']}"
            )

    def _release_segments(self) -> None:
        self.droppable = set(filter(is_segment, self.covers))

    def _resumed(self, record: AuditRecord) -> None:
        version = record.body["version"]
        self.parts[-1].resumed_from = version
        self.parts[-1].is_accepted = True
        self._release_segments()
        self._leave(version)
        known = self.checkpoints.get(version)
        if known is not None and known.record.body["manifest"] != record.body["manifest"]:
            self._find(f"{record.name} loaded another checkpoint than {known.record.name} had written")
        if known is None:  # the process was killed between the checkpoint and its record
            self.checkpoints[version] = SavedCheckpoint(record, len(self.parts) - 1)

    def _recovered(self, record: AuditRecord) -> None:
        self.parts[-1].recovered_to = record.body["version"]
        for prompt_id in map(str, record.body.get("pending", ())):
            self._hand_out(prompt_id)
        for prompt_id in map(str, record.body.get("settled", ())):
            # Prompts of repeated steps are settled, too: the account counts them as trained.
            self.part_of.setdefault(prompt_id, len(self.parts))
            self.reasons.setdefault(prompt_id, SETTLED)

    def _checkpoint(self, record: AuditRecord) -> None:
        version = record.body["version"]
        if version == 0:
            self._leave(0)  # a new run, where an earlier one was killed before its first checkpoint
        self._cover_journal(_covers(record, record.body.get("journal", {})))
        self._release_segments()
        self.parts[-1].is_accepted = True
        self.checkpoints[version] = SavedCheckpoint(record, len(self.parts) - 1)

    def _trained(self, record: AuditRecord) -> None:
        version, part = record.body["version"], self.parts[-1]
        groups = _groups(record)
        tokens = {str(i): {int(v): num for v, num in counts.items()} for i, _, counts in record.body["groups"]}
        _integers(*(num for counts in tokens.values() for pair in counts.items() for num in pair))
        self._cover_journal(_covers(record, record.body.get("journal", {})))
        if version in self.steps:
            self._find(f"{record.name} trains a version that {self.steps[version].record.name} had made")
        if version - 1 not in self.steps and version != 1:
            self._find(f"{record.name} has no record of version {version - 1} before it")
        left = self.void.get(version)
        if left is not None and left.groups == groups:
            self.num_remade += 1
        elif left is not None and record.body["source"] == "journal":
            self._find(f"{record.name} was read from the journal and differs from {left.record.name}")
        if record.body["source"] == "journal" and version in self._void_rollbacks:
            self.rollbacks[version] = self._void_rollbacks[version]  # a resume applies it again
        self._add_prompts(record)
        self.steps[version] = AuditedStep(record, groups, tokens, len(self.parts) - 1, part.bounds)

    def _repeated(self, record: AuditRecord) -> None:
        step, groups = self.steps.get(record.body["version"]), _groups(record)
        if step is None:
            self._find(f"{record.name} repeats a step that was never trained")
        elif step.groups != groups:
            changed = sorted(i for i in groups if groups[i] != step.groups.get(i))
            self._find(f"{record.name} repeats {step.record.name} from other groups: {named(changed)}")
        else:
            step.num_repeats += 1

    def _restored(self, record: AuditRecord) -> None:
        self.parts[-1].num_restored += 1

    def _regenerated(self, record: AuditRecord) -> None:
        self.regenerated[str(record.body["group"][0])] = record.body["source"]

    def _lost(self, record: AuditRecord) -> None:
        Fault(**record.body)
        self.parts[-1].losses.append(record.body)

    def _metrics(self, record: AuditRecord) -> None:
        self.metrics.append(record)
        for name, cover in self.covers.items():
            self.covers[name] = replace(cover, instead=None)  # a step's record follows the files of the step

    def _written(self, record: AuditRecord) -> None:
        name, known = record.body["file"], self.covers.get(record.body["file"])
        cover = Cover(record, record.body["num_bytes"], record.body["sha256"], is_whole=True)
        self.covers[name] = replace(cover, instead=None if known is None else replace(known, instead=None))

    def _cover_journal(self, found: Mapping[str, Cover]) -> None:
        for name, cover in found.items():
            self.covers[name] = replace(cover, earlier=self.covers[name].earlier if name in self.covers else None)
        for name in [name for name in self.covers if is_segment(name) and found and name < min(found)]:
            del self.covers[name]  # a checkpoint has its groups, and it was removed

    def _pushed(self, record: AuditRecord) -> None:
        if not all(isinstance(how, str) for how in record.body["receivers"].values()):
            raise TypeError("a receiver has no text")
        self.pushes.append(record)
        self.served.add(record.body["version"])
        for engine, how in record.body["receivers"].items():
            self.receipts[engine][how] += 1

    def _admitted(self, record: AuditRecord) -> None:
        self.num_admitted[record.body["engine"]] += 1
        self.served.add(record.body["version"])

    def _logged(self, record: AuditRecord) -> None:
        self.logged[record.body["version"]] = record

    def _guarded(self, record: AuditRecord) -> None:
        self.guarded[record.body["version"]] = record

    def _rolled_back(self, record: AuditRecord) -> None:
        version, restored = record.body["version"], record.body["restored"]
        self.rollbacks[version] = record
        if restored not in self.checkpoints or restored >= version:
            self._find(f"{record.name} loaded version {restored}, of which no record has a checkpoint before it")

    def _end(self, record: AuditRecord) -> None:
        covers = _covers(record, record.body["files"])
        self.covers = {
            name: replace(cover, earlier=known.earlier) if (known := self.covers.get(name)) else cover
            for name, cover in covers.items()
        }
        self.parts[-1].status = record.body["status"]
        self.ended = record
        self._add_prompts(record)

    def _add_prompts(self, record: AuditRecord) -> None:
        rejected = record.body.get("rejected", ())
        self.rejected.update(str(reason) for _, reason in rejected)
        for prompt_id in map(str, record.body.get("handed_out", ())):  # hand-outs come before rejections
            self._hand_out(prompt_id)
        self.reasons |= {str(prompt_id): str(reason) for prompt_id, reason in rejected}

    def _hand_out(self, prompt_id: str) -> None:
        self.part_of[prompt_id] = len(self.parts)
        self.reasons.pop(prompt_id, None)  # a resume from an older checkpoint voids the rejection

    def _leave(self, version: int) -> None:
        for later in [made for made in self.steps if made > version]:
            self.void[later] = self.steps.pop(later)
            self.num_void += 1
        self.checkpoints = {saved: value for saved, value in self.checkpoints.items() if saved <= version}
        self._void_rollbacks |= {made: record for made, record in self.rollbacks.items() if made > version}
        self.rollbacks = {made: record for made, record in self.rollbacks.items() if made <= version}
        self.guarded = {made: record for made, record in self.guarded.items() if made <= version}

    def descent(self, version: int) -> Descent:
        """Returns what the weights of `version` were made of, back to the newest checkpoint before them."""
        steps: list[int] = []
        made = version
        while made > 0 and (made == version or made not in self.checkpoints):
            if made in self.rollbacks and self.rollbacks[made].body["restored"] < made:
                made = self.rollbacks[made].body["restored"]
            elif made in self.steps:
                steps.append(made)
                made -= 1
            else:
                break
        return Descent(made, tuple(reversed(steps)))


# Kind of a record -> (the function that applies it, type of each key of its body that the replay reads)
REPLAY: Mapping[str, tuple[Callable[[History, AuditRecord], None], Mapping[str, Any]]] = {
    AuditKind.STARTED: (
        History._started,
        {"code": dict, "bounds": dict, "found": dict, "metrics": dict, "config_sha256": str},
    ),
    AuditKind.RESUMED: (History._resumed, {"version": int, "manifest": str}),
    AuditKind.RECOVERED: (History._recovered, {"version": int}),
    AuditKind.CHECKPOINT: (History._checkpoint, {"version": int, "manifest": str}),
    AuditKind.TRAINED: (History._trained, {"version": int, "source": str, "groups": list}),
    AuditKind.REPEATED: (History._repeated, {"version": int, "groups": list}),
    AuditKind.RESTORED: (History._restored, {"version": int}),
    AuditKind.REGENERATED: (History._regenerated, {"group": list, "source": str}),
    AuditKind.PUSHED: (History._pushed, {"version": int, "manifest": str, "receivers": dict}),
    AuditKind.ADMITTED: (History._admitted, {"version": int, "engine": str}),
    AuditKind.LOST: (History._lost, {"worker": str, "at_s": int | float}),
    AuditKind.METRICS: (History._metrics, {"version": int, "of": str, "sha256": str}),
    AuditKind.WRITTEN: (History._written, {"file": str, "num_bytes": int, "sha256": str}),
    AuditKind.LOGGED: (History._logged, {"version": int, "file": str, "num_bytes": int, "sha256": str}),
    AuditKind.GUARDED: (History._guarded, {"version": int, "action": str, "text": str}),
    AuditKind.ROLLED_BACK: (History._rolled_back, {"version": int, "restored": int, "text": str}),
    AuditKind.ENDED: (History._end, {"status": str, "files": dict}),
}


def _integers(*values: Any) -> None:
    """Raises: ValueError: a value is no number of 63 bits."""
    wrong = [value for value in values if type(value) is not int or not 0 <= value < 2**63]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is no number here")


def _groups(record: AuditRecord) -> dict[str, str]:
    return {str(group_id): str(digest) for group_id, digest, _ in record.body["groups"]}


def _covers(record: AuditRecord, files: Mapping[str, Any]) -> dict[str, Cover]:
    covers = {}
    for name, (num_bytes, sha256) in files.items():
        _integers(num_bytes)
        is_whole = not is_growing(name) and (record.kind == AuditKind.ENDED or not is_segment(name))
        covers[name] = Cover(record, num_bytes, str(sha256), is_whole)
    return covers


def replayed(chain: ChainFile) -> History:
    history = History()
    for record in chain.records:
        history.add(record)
    return history


def named(names: list[str]) -> str:
    """Returns the first names, and the number of the others."""
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True)
class PromptAccount:
    """Each prompt that was handed out is in one of the four lists."""

    trained: tuple[str, ...]
    rejected: tuple[tuple[str, str], ...]  # id, reason
    open: tuple[str, ...]  # known to the newest part: in flight, or in the buffer
    lost: tuple[str, ...]  # handed out by an earlier part, and not known to the newest one

    @property
    def num(self) -> int:
        return len(self.trained) + len(self.rejected) + len(self.open) + len(self.lost)


@dataclass(frozen=True)
class Staleness:
    """Lag of trained tokens: the version that their step trains from, less the version that sampled them."""

    tokens_by_lag: Mapping[int, int]
    max_allowed: int | None  # the largest algorithm.max_staleness of all parts; None if it is not known

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens_by_lag.values())

    @property
    def mean(self) -> float:
        return sum(lag * num for lag, num in self.tokens_by_lag.items()) / max(1, self.num_tokens)

    @property
    def max(self) -> int:
        return max(self.tokens_by_lag, default=0)


def staleness_of(history: History) -> Staleness:
    lags: Counter[int] = Counter()
    for version, step in history.steps.items():
        for tokens in step.tokens.values():
            lags.update({version - 1 - sampled: num for sampled, num in tokens.items()})
    bounds = [step.bounds["max_staleness"] for step in history.steps.values()]
    allowed = None if None in bounds else max(bounds, default=0)
    return Staleness(dict(sorted((lag, num) for lag, num in lags.items() if num)), allowed)


def check_staleness(history: History) -> Iterator[AuditFinding]:
    """Yields tokens over the bound, of a version after the step's, or of a version that no engine had received."""
    newest = max(history.served, default=0)
    for version, step in history.steps.items():
        for group_id, tokens in step.tokens.items():
            for sampled in (sampled for sampled, num in tokens.items() if num):
                problem = _problem_of(version - 1 - sampled, step)
                if not problem and history.pushes and sampled < newest and sampled not in history.served:
                    problem = f"of version {sampled}, which was never pushed"
                if problem:
                    yield AuditFinding(AUDIT_FILE, f"{step.record.name}: group {group_id} has tokens {problem}")


def _problem_of(lag: int, step: AuditedStep) -> str:
    if lag < 0:
        return f"of version {step.record.body['version'] - 1 - lag}, which did not exist yet"
    limit = step.bounds["max_staleness"]
    if limit is not None and lag > limit and step.bounds["stragglers"] == "wait":
        return f"that are {lag} versions old, and algorithm.max_staleness is {limit}"
    return ""


def check_groups(history: History) -> Iterator[AuditFinding]:
    """Yields groups that stand in two steps of the run's line of versions."""
    steps_of: dict[str, list[int]] = defaultdict(list)
    for version, step in history.steps.items():
        for group_id in step.groups:
            steps_of[group_id].append(version)
        if len(step.groups) < len(step.record.body["groups"]):
            yield AuditFinding(AUDIT_FILE, f"{step.record.name} has a group twice")
    twice = {group_id: versions for group_id, versions in steps_of.items() if len(versions) > 1}
    for group_id, versions in twice.items():
        made = " and ".join(map(str, versions))
        yield AuditFinding(AUDIT_FILE, f"group {group_id} was trained {len(versions)} times, for versions {made}")
    gaps = [f"{low + 1} to {high - 1}" for low, high in pairwise([0, *sorted(history.steps)]) if low + 1 < high]
    if gaps:
        yield AuditFinding(AUDIT_FILE, f"versions {named(gaps)} have no record of their step")


def account_of(history: History) -> PromptAccount:
    """Returns what became of each prompt that was handed out."""
    known, newest = set(history.trained), len(history.parts)
    others = {prompt_id: part for prompt_id, part in history.part_of.items() if prompt_id not in known}
    left = {prompt_id: part for prompt_id, part in others.items() if prompt_id not in history.reasons}
    return PromptAccount(
        trained=tuple(prompt_id for prompt_id in history.part_of if prompt_id in known),
        rejected=tuple((i, history.reasons[i]) for i in others if i in history.reasons),
        open=tuple(prompt_id for prompt_id, part in left.items() if part == newest),
        lost=tuple(prompt_id for prompt_id, part in left.items() if part < newest),
    )


def check_prompts(history: History) -> Iterator[AuditFinding]:
    """Yields trained and rejected prompts that were never handed out, if the run records hand-outs."""
    asked = (*history.trained, *history.reasons) if history.part_of else ()
    unknown = [prompt_id for prompt_id in asked if prompt_id not in history.part_of]
    if unknown:
        yield AuditFinding(AUDIT_FILE, f"prompts {named(unknown)} were trained or rejected, and never handed out")


def check_pushes(history: History) -> Iterator[AuditFinding]:
    """Yields pushes that an engine took without a check of its bytes."""
    for record in history.pushes:
        engines = [engine for engine, how in record.body["receivers"].items() if how not in VERIFIED]
        if engines:
            where = named(engines)
            yield AuditFinding(AUDIT_FILE, f"{record.name} was verified neither by checksum nor by canary at {where}")


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side; equal digests mean equal bits."""

    equal_to: int  # the newest version up to which all steps have equal groups
    num_shared: int  # steps that both runs have
    first_difference: str  # the first group that differs in content, order or presence; empty if there is none
    has_equal_policy: bool | None  # None: a run has not ended, or wrote no policy


def compare(ours: History, theirs: History) -> Comparison:
    shared = sorted(ours.steps.keys() & theirs.steps.keys())
    equal_to = 0
    for version in shared:
        difference = _difference(ours.steps[version], theirs.steps[version])
        if difference:
            return Comparison(equal_to, len(shared), difference, _has_equal_policy(ours, theirs))
        equal_to = version
    return Comparison(equal_to, len(shared), "", _has_equal_policy(ours, theirs))


def _difference(ours: AuditedStep, theirs: AuditedStep) -> str:
    for (group, digest), (other, other_digest) in zip(ours.groups.items(), theirs.groups.items(), strict=False):
        if group != other:
            return f"{group} in place of {other}"
        if digest != other_digest:
            return f"{group}, with other content"
    return "" if len(ours.groups) == len(theirs.groups) else "the number of groups"


def _has_equal_policy(ours: History, theirs: History) -> bool | None:
    if ours.ended is None or theirs.ended is None:
        return None
    files = [
        {name: value for name, value in history.ended.body["files"].items() if name.startswith(POLICY)}
        for history in (ours, theirs)
        if history.ended is not None
    ]
    return files[0] == files[1] if files[0] and files[1] else None

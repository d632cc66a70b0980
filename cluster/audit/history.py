"""History: what the records of a chain say about a run, replayed in order."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mobula.cluster.audit.chain import AUDIT_FILE, AuditKind, AuditRecord
from mobula.cluster.audit.order import AuditFinding
from mobula.cluster.audit.prompts import PromptLedger

MAX_NAMED = 5  # groups in one message
UNKNOWN_BOUNDS: Mapping[str, Any] = {"max_staleness": None, "stragglers": "wait"}


@dataclass
class Part:
    """One process's part of a run, from its start to its end or kill."""

    started: AuditRecord | None  # None: its first record is missing or damaged
    resumed_from: int | None = None  # version of the checkpoint; None for a new run
    recovered_to: int | None = None  # after the steps of the journal
    status: str | None = None  # None: it was killed, or goes on
    losses: list[Mapping[str, Any]] = field(default_factory=list)
    num_restored: int = 0  # restarts of the learner ranks

    @property
    def bounds(self) -> Mapping[str, Any]:
        return UNKNOWN_BOUNDS if self.started is None else self.started.body["bounds"]


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
    """What the weights of a version were made of: `steps` were trained on the checkpoint of version `base`, in order.

    A rollback leaves out the steps whose weights it replaced.
    """

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
        self.prompts = PromptLedger()
        self.regenerated: dict[str, str] = {}  # group -> source
        self.guarded: dict[int, AuditRecord] = {}  # actions of the guard by the version of their step
        self.rollbacks: dict[int, AuditRecord] = {}  # by the version whose weights they replaced
        self._void_rollbacks: dict[int, AuditRecord] = {}
        self.metrics: list[AuditRecord] = []  # of the newest part
        self.logged: dict[int, AuditRecord] = {}
        self.ended: AuditRecord | None = None  # if it is the newest record
        self.findings: list[AuditFinding] = []
        self._handlers: Mapping[str, Callable[[AuditRecord], None]] = {
            AuditKind.STARTED: self._started,
            AuditKind.RESUMED: self._resumed,
            AuditKind.RECOVERED: self._recovered,
            AuditKind.CHECKPOINT: self._checkpoint,
            AuditKind.TRAINED: self._trained,
            AuditKind.REPEATED: self._repeated,
            AuditKind.RESTORED: self._restored,
            AuditKind.REGENERATED: self._regenerated,
            AuditKind.PUSHED: self._pushed,
            AuditKind.ADMITTED: self._admitted,
            AuditKind.LOST: lambda record: self.parts[-1].losses.append(record.body),
            AuditKind.METRICS: lambda record: self.metrics.append(record),
            AuditKind.LOGGED: self._logged,
            AuditKind.GUARDED: self._guarded,
            AuditKind.ROLLED_BACK: self._rolled_back,
            AuditKind.ENDED: self._end,
        }

    @property
    def version(self) -> int:
        """The newest version of the line."""
        return max(self.steps, default=0)

    def add(self, record: AuditRecord) -> None:
        """Applies the next record. A record of an unknown kind changes nothing."""
        self.ended = None
        if not self.parts and record.kind != AuditKind.STARTED:
            self.parts.append(Part(None))
            self._find(f"{record.name} stands before the start of the run")
        try:
            if record.kind in self._handlers:
                self._handlers[record.kind](record)
        except (KeyError, TypeError, ValueError) as error:
            self._find(f"{record.name} is not as this version writes it ({type(error).__name__}: {error})")

    def _find(self, message: str) -> None:
        self.findings.append(AuditFinding(AUDIT_FILE, message))

    def _started(self, record: AuditRecord) -> None:
        self.parts.append(Part(record))
        self.prompts.begin_part()
        self.metrics = []
        head = record.body["found"]["head"]
        if head is not None:
            num = record.body["found"]["num_records"]
            self._find(f"when {record.name} was written, the chain had {num} records and audit.head said {head}")

    def _resumed(self, record: AuditRecord) -> None:
        version = record.body["version"]
        self.parts[-1].resumed_from = version
        self._leave(version)
        known = self.checkpoints.get(version)
        if known is not None and known.record.body["manifest"] != record.body["manifest"]:
            self._find(f"{record.name} loaded another checkpoint than {known.record.name} had written")
        if known is None:  # the process was killed between the checkpoint and its record
            self.checkpoints[version] = SavedCheckpoint(record, len(self.parts) - 1)

    def _recovered(self, record: AuditRecord) -> None:
        self.parts[-1].recovered_to = record.body["version"]
        self.prompts.continued(record.body.get("pending", ()), record.body.get("settled", ()))

    def _checkpoint(self, record: AuditRecord) -> None:
        version = record.body["version"]
        if version == 0:
            self._leave(0)  # a new run, where an earlier one was killed before its first checkpoint
        self.checkpoints[version] = SavedCheckpoint(record, len(self.parts) - 1)

    def _trained(self, record: AuditRecord) -> None:
        version, part = record.body["version"], self.parts[-1]
        groups = {group_id: digest for group_id, digest, _ in record.body["groups"]}
        tokens = {i: {int(v): num for v, num in counts.items()} for i, _, counts in record.body["groups"]}
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
        step = self.steps.get(record.body["version"])
        groups = {group_id: digest for group_id, digest, _ in record.body["groups"]}
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
        self.regenerated[record.body["group"][0]] = record.body["source"]

    def _pushed(self, record: AuditRecord) -> None:
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
        self.parts[-1].status = record.body["status"]
        self.ended = record
        self._add_prompts(record)

    def _add_prompts(self, record: AuditRecord) -> None:
        rejected = record.body.get("rejected", ())
        self.rejected.update(reason for _, reason in rejected)
        self.prompts.add(record.body.get("handed_out", ()), rejected)

    def _leave(self, version: int) -> None:
        """Voids the steps and checkpoints after `version`."""
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
            if made in self.rollbacks:
                made = self.rollbacks[made].body["restored"]
            else:
                steps.append(made)
                made -= 1
        return Descent(made, tuple(reversed(steps)))


def named(names: list[str]) -> str:
    """Returns the first names, and the number of the others."""
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")

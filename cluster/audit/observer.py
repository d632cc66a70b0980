"""RunAudit: turns the events of a run into records of its hash chain."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mobula.cluster.audit.chain import AuditKind, ChainWriter, Head, JournalDigests, digests_below
from mobula.cluster.files import file_sha256, write_atomically
from mobula.cluster.metrics.guard_events import GuardEvent
from mobula.cluster.metrics.report.run_folder import METRICS_FILE, SAMPLES_FILE
from mobula.cluster.metrics.step_records import MetricsRecord, StepRecord, to_line
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.cluster.recovery.checkpoints import MANIFEST_FILE, Recovery, checkpoint_folder, versions_in
from mobula.cluster.rollout.dispatcher import PromptObserver
from mobula.cluster.weight_sync.weight_sync import Push
from mobula.cluster.workers.faults import Fault

MAX_STRENGTH = 1e9  # of an alarm: JSON has no infinity

_logger = logging.getLogger(__name__)


def group_entry(group: ScoredGroup) -> list[Any]:
    """Returns id, digest of content and rewards, and trained tokens by the version that sampled them."""
    summary = group.summary
    values = [
        None if reward is None else [reward.value, *sorted(reward.components.items())] for reward in group.rewards
    ]
    digest = hashlib.sha256(f"{summary.sha256}{json.dumps(values)}".encode()).hexdigest()
    return [summary.group_id, digest, {str(version): num for version, num in summary.tokens_by_version.items()}]


class RunAudit(PromptObserver):
    """Records steps, pushes, checkpoints, restarts and metrics of a run. Implements `Sink`: each line of
    `metrics.jsonl` is recorded before it is written."""

    name = "audit"

    def __init__(self, chain: ChainWriter | None = None, run_folder: Path = Path(), checkpoints: Path = Path()) -> None:
        """`checkpoints` is the folder of the run's checkpoints. Without `chain` nothing is recorded, and no file is
        read for it."""
        self._chain = chain
        self._run_folder = run_folder
        self._checkpoints = checkpoints
        # Prompts are part of the record of the next step, or of the recovery.
        self._rejected: list[tuple[str, str]] = []
        self._handed_out: list[str] = []
        self._continued: dict[str, list[str]] = {}
        self._is_recovering = False
        self._journal = JournalDigests(run_folder)

    def _record(self, kind: AuditKind, body: Mapping[str, Any]) -> None:
        if self._chain is not None:
            self._chain.record(kind, body)

    def started(self, body: Mapping[str, Any]) -> None:
        """A part of the run begins; `body` is of `mobula.deploy.run.overview`. Call it once `metrics.jsonl` has the
        lines that this part keeps."""
        if self._chain is None:
            return
        metrics = self._run_folder / METRICS_FILE
        content = metrics.read_bytes() if metrics.is_file() else b""
        kept = {"num_lines": content.count(b"\n"), "sha256": hashlib.sha256(content).hexdigest()}
        files = self._journal.now()
        if (self._run_folder / SAMPLES_FILE).is_file():
            files[SAMPLES_FILE] = _size_and_digest((self._run_folder / SAMPLES_FILE).read_bytes())
        found = asdict(self._chain.found)
        self._record(AuditKind.STARTED, {**body, "found": found, "metrics": kept, "files": files})

    def write(self, path: Path, text: str) -> None:
        """Replaces the content of a file of the run folder, after a record of its digest."""
        self._record_written(path, text.encode())
        try:
            write_atomically(path, text)
        except OSError:
            if path.is_file():
                self._record_written(path, path.read_bytes())
            raise

    def _record_written(self, path: Path, content: bytes) -> None:
        if self._chain is not None:
            num_bytes, sha256 = _size_and_digest(content)
            name = str(path.relative_to(self._run_folder))
            self._record(AuditKind.WRITTEN, {"file": name, "num_bytes": num_bytes, "sha256": sha256})

    def trained(self, version: int, groups: Sequence[ScoredGroup]) -> None:
        """Implements `StepObserver`."""
        prompts = self._taken_prompts()
        if self._chain is not None:
            body = {
                "version": version,
                "source": "journal" if self._is_recovering else "new",
                "groups": [group_entry(group) for group in groups],
                **prompts,
                "journal": self._journal.now(),
            }
            self._record(AuditKind.TRAINED, body)

    def repeated(self, version: int, groups: Sequence[ScoredGroup]) -> None:
        body = {"version": version, "groups": [group_entry(group) for group in groups]}
        self._record(AuditKind.REPEATED, body)

    def restored(self, version: int) -> None:
        self._record(AuditKind.RESTORED, {"version": version})

    def regenerated(self, group: ScoredGroup, source: str) -> None:
        self._record(AuditKind.REGENERATED, {"group": group_entry(group), "source": source})

    def handed_out(self, prompt_id: str) -> None:
        self._handed_out.append(prompt_id)

    def left_out(self, prompt_id: str, reason: str) -> None:
        self._rejected.append((prompt_id, reason))

    def continued(self, pending: Sequence[str], settled: Sequence[str]) -> None:
        self._continued = {"pending": list(pending), "settled": list(settled)}

    def _taken_prompts(self) -> dict[str, Any]:
        taken = {"handed_out": self._handed_out, "rejected": self._rejected}
        self._handed_out, self._rejected = [], []
        return taken

    async def pushed(self, push: Push) -> None:
        """A listener of `WeightSync.on_published`."""
        body = {
            "version": push.version,
            "manifest": push.manifest_sha256,
            "weights": push.checksum,
            "num_bytes": push.num_bytes,
            "receivers": dict(push.receivers),
            "num_lost": push.num_lost,
            "canary_gap": push.canary_gap,
        }
        self._record(AuditKind.PUSHED, body)

    def admitted(self, engine: str, version: int) -> None:
        """A listener of `WeightSync.on_admitted`."""
        self._record(AuditKind.ADMITTED, {"engine": engine, "version": version})

    def lost(self, fault: Fault) -> None:
        """A listener of `FaultFile`."""
        self._record(AuditKind.LOST, asdict(fault))

    def emit(self, record: MetricsRecord) -> None:
        """Raises: OSError: the chain cannot be written; the hub drops and counts this sink."""
        kind = "step" if isinstance(record, StepRecord) else "evaluation"
        _, line = _size_and_digest(f"{to_line(record)}\n".encode())
        self._record(AuditKind.METRICS, {"version": record.version, "of": kind, "sha256": line})
        if self._chain is not None and self._chain.error is not None:
            raise self._chain.error

    emit_evaluation = emit

    def close(self) -> None:
        """Does nothing: records follow until `ended`."""

    def guarded(self, event: GuardEvent) -> None:
        """Records an action of the guard, before the version of its step is pushed."""
        kind = AuditKind.GUARDED if event.restored is None else AuditKind.ROLLED_BACK
        self._record(kind, {**asdict(event), "strength": min(event.strength, MAX_STRENGTH)})

    def logged(self, version: int, path: Path) -> None:
        """Records the file of a step in the trajectory log; a listener of `TrajectoryLog`."""
        if self._chain is not None:
            file = {"file": str(path.relative_to(self._run_folder)), "num_bytes": path.stat().st_size}
            self._record(AuditKind.LOGGED, {"version": version, **file, "sha256": file_sha256(path)})

    def checkpointed(self, version: int) -> None:
        """Records the checkpoint of `version`, which is complete."""
        if self._chain is not None:
            body = {**self._checkpoint(version), "kept": versions_in(self._checkpoints), "journal": self._journal.now()}
            self._record(AuditKind.CHECKPOINT, body)
            self._log_head(f"at the checkpoint of step {version}", self._chain.head)

    def resumed(self, version: int) -> None:
        """The run continues from the checkpoint of `version`; the steps of the journal follow."""
        self._is_recovering = True
        if self._chain is not None:
            self._record(AuditKind.RESUMED, self._checkpoint(version))

    def _checkpoint(self, version: int) -> dict[str, Any]:
        manifest = checkpoint_folder(self._checkpoints, version) / MANIFEST_FILE
        return {"version": version, "manifest": file_sha256(manifest)}

    def recovered(self, version: int) -> None:
        """The steps of the journal are repeated."""
        self._is_recovering = False
        continued, self._continued = self._continued, {}
        self._record(AuditKind.RECOVERED, {"version": version, **continued})

    def ended(self, status: str, version: int) -> None:
        """This part of the run is over and its files are written. Reads them, then closes the chain."""
        if self._chain is not None:
            files = digests_below(self._run_folder)
            body = {"status": status, "version": version, "files": files, "covers_all": True, **self._taken_prompts()}
            self._record(AuditKind.ENDED, body)
            self._log_head("at the end", self._chain.head)
            self._chain.close()

    def _log_head(self, when: str, head: Head) -> None:
        _logger.info("audit %s: %d records, sha256 %s", when, head.num_records, head.sha256, extra={"file_only": True})


def _size_and_digest(content: bytes) -> tuple[int, str]:
    return len(content), hashlib.sha256(content).hexdigest()


class AuditedRecovery(Recovery):
    """Records checkpoints and resumes of another recovery."""

    def __init__(self, recovery: Recovery, audit: RunAudit) -> None:
        self._recovery = recovery
        self._audit = audit

    async def begin(self) -> None:
        await self._recovery.begin()

    async def recover(self, version: int) -> int:
        self._audit.resumed(version)
        reached = await self._recovery.recover(version)
        self._audit.recovered(reached)
        return reached

    async def saved(self, version: int) -> None:
        self._audit.checkpointed(version)
        await self._recovery.saved(version)

"""Verification of a run folder: reads the chain, replays it, and compares it with the other files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mobula.cluster.audit.chain import AUDIT_FILE, HEAD_FILE, DamagedRecord, Head, split
from mobula.cluster.audit.coverage import check_files
from mobula.cluster.audit.history import History
from mobula.cluster.audit.order import AuditFinding, ChainFile, check_order
from mobula.cluster.audit.proofs import check_groups, check_prompts, check_pushes, check_staleness
from mobula.cluster.errors import PreflightError


@dataclass(frozen=True)
class Audit:
    """The history of a run, and its faults: `findings` is empty if there is none."""

    history: History
    findings: Sequence[AuditFinding]
    num_records: int
    sha256: str  # of the newest record
    has_torn_end: bool


def read_chain(folder: Path) -> ChainFile:
    """Reads the chain of a run folder.

    Raises:
        PreflightError: there is none.
    """
    path, end = folder / AUDIT_FILE, folder / HEAD_FILE
    try:
        # The end first: a run that goes on writes it after the record.
        head: Head | str = Head.decoded(end.read_bytes())
    except FileNotFoundError:
        head = "it is missing"
    except DamagedRecord as error:
        head = f"it was altered: {error}"
    try:
        lines, num_torn = split(path.read_bytes())
    except OSError as error:
        raise PreflightError(
            f"{path} cannot be read ({error.strerror}): give a run that has been written with metrics.audit=true"
        ) from error
    return ChainFile(lines, num_torn, head)


def replayed(chain: ChainFile) -> History:
    """Replays the undamaged records of a chain."""
    history = History()
    for record in chain.records:
        history.add(record)
    return history


def verify(folder: Path, checkpoints: Path, head: str = "") -> Audit:
    """Audits a run folder. `head`: the sha256 of a record that was noted elsewhere and must be part of the chain.

    Raises:
        PreflightError: there is no chain, or no record of it can be read.
    """
    chain = read_chain(folder)
    records = chain.records
    findings = list(check_order(chain))
    if head and head not in {record.sha256 for record in records}:
        findings.append(
            AuditFinding(AUDIT_FILE, f"no record has the sha256 {head}: the chain is another one, or was cut")
        )
    if not records:
        raise PreflightError(f"{folder / AUDIT_FILE} has no readable record: put the file of the run back")
    history = replayed(chain)
    findings += history.findings
    findings += check_staleness(history)
    findings += check_groups(history)
    findings += check_prompts(history)
    findings += check_pushes(history)
    findings += check_files(history, folder, checkpoints)
    newest = records[-1]
    return Audit(history, list(dict.fromkeys(findings)), len(records), newest.sha256, chain.has_torn_end)

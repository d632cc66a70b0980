"""Verification of a run folder: reads the chain, replays it, and compares it with the files."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath

from mobula.cluster.audit.chain import (
    AUDIT_FILE,
    CHECKPOINTS,
    FORMERLY_UNCOVERED,
    GENESIS,
    HEAD_FILE,
    RUN_LOG,
    TRAJECTORIES,
    AuditFinding,
    AuditRecord,
    ChainFile,
    Head,
    Line,
    SigningKey,
    files_below,
    is_segment,
    is_uncovered,
    read_chain,
)
from mobula.cluster.audit.history import (
    Cover,
    History,
    check_groups,
    check_prompts,
    check_pushes,
    check_staleness,
    replayed,
)
from mobula.cluster.errors import PreflightError
from mobula.cluster.files import file_sha256
from mobula.cluster.metrics.report.run_folder import CONFIG_FILE, METRICS_FILE
from mobula.cluster.recovery.checkpoints import MANIFEST_FILE, STATE_FILE, checkpoint_folder, versions_in
from mobula.cluster.workers.faults import FAULTS_FILE, Fault, fault_line

NOTED = re.compile(
    r"^[\d-]+ [\d:,]+ INFO mobula\.cluster\.audit\.observer: audit .*: (\d{1,18}) records, sha256 (\w{64})$"
)


@dataclass(frozen=True)
class Audit:
    """The history of a run, and its faults: `findings` is empty if there is none."""

    history: History
    findings: Sequence[AuditFinding]
    uncovered: Sequence[str]  # files of the run folder that no record has
    num_records: int
    newest: AuditRecord
    is_signed: bool  # every record was signed with the key that was given
    has_torn_end: bool

    @property
    def is_closed(self) -> bool:
        """Whether the newest record closes the run. Otherwise it goes on, was killed, or lacks its last records."""
        return self.history.ended is not None


def verify(folder: Path, head: str = "", key: SigningKey | None = None) -> Audit:
    """Audits a run folder. `head`: the sha256 of a record that was noted elsewhere and must be part of the chain."""
    chain = read_chain(folder)
    records = chain.records
    if not records:
        raise PreflightError(f"{folder / AUDIT_FILE} has no readable record: put the file of the run back")
    history = replayed(chain)
    signatures = list(_check_signatures(chain, key))
    findings = [*_check_order(chain), *signatures]
    if head and head not in {record.sha256 for record in records}:
        findings.append(
            AuditFinding(AUDIT_FILE, f"no record has the sha256 {head}: the chain is another one, or was cut")
        )
    findings += history.findings
    for check in (check_staleness, check_groups, check_prompts, check_pushes):
        findings += check(history)
    findings += _check_noted(chain, folder / RUN_LOG)
    known, uncovered = set[str](), list[str]()
    for check_files in (_check_config, _check_metrics, _check_faults, _check_checkpoints, _check_logged, _check_covers):
        findings += check_files(history, folder, known)
    findings += _check_others(history, folder, known, uncovered)
    is_signed = key is not None and not signatures
    return Audit(
        history, list(dict.fromkeys(findings)), uncovered, len(records), records[-1], is_signed, chain.has_torn_end
    )


def _check_order(chain: ChainFile) -> Iterator[AuditFinding]:
    """Yields every record that was altered, removed, added, replaced or moved; empty for a chain as it was written."""
    intact = [(line.number, line.record) for line in chain.lines if line.record]
    present = Counter(record.seq for _, record in intact)
    num_counted = chain.head.num_records if isinstance(chain.head, Head) else 0
    end = max([num_counted, *(seq + 1 for seq in present)])
    damaged = _damaged(chain.lines, _gaps(present, end))
    for line, seq in damaged:
        yield AuditFinding(AUDIT_FILE, f"record {seq} (line {line.number}) was altered: {line.fault}")
    absent = _gaps({*present, *(seq for _, seq in damaged)}, end)
    if chain.num_torn_bytes and not chain.has_torn_end:
        number = absent[-1][-1] if absent else len(chain.lines)
        absent = _gaps({*present, *(seq for _, seq in damaged), number}, end)
        yield AuditFinding(
            AUDIT_FILE, f"record {number} was altered: its line has no end ({chain.num_torn_bytes} bytes)"
        )
    for gap in absent:
        are = f"record {gap[0]} is" if gap[0] == gap[-1] else f"records {gap[0]} to {gap[-1]} are"
        yield AuditFinding(AUDIT_FILE, f"{are} missing")
    for seq, num in present.items():
        if num > 1:
            yield AuditFinding(AUDIT_FILE, f"record {seq} stands {num} times in the file")
    for (_, before), (number, record) in pairwise(intact):
        if record.seq < before.seq:
            yield AuditFinding(
                AUDIT_FILE, f"{record.name} stands after {before.name} (line {number}): records were moved"
            )
    yield from _check_links({record.seq: record for _, record in intact})
    yield from _check_head(chain, intact)


def _damaged(lines: Sequence[Line], gaps: Sequence[range]) -> list[tuple[Line, int]]:
    """Returns the damaged lines with the number of the record that each was, by its place."""
    found: list[tuple[Line, int]] = []
    expected = 0
    for line in lines:
        if line.record is not None:
            expected = line.record.seq + 1
            continue
        found.append((line, next((max(gap.start, expected) for gap in gaps if gap.stop > expected), expected)))
        expected = found[-1][1] + 1
    return found


def _gaps(numbers: Iterable[int], end: int) -> list[range]:
    """Returns the ranges below `end` without a number: a foreign chain may count to any number."""
    edges = [-1, *sorted(numbers), end]
    return [range(low + 1, high) for low, high in pairwise(edges) if low + 1 < high]


def _check_links(by_number: dict[int, AuditRecord]) -> Iterator[AuditFinding]:
    for seq, record in by_number.items():
        before = GENESIS if seq == 0 else by_number[seq - 1].sha256 if seq - 1 in by_number else record.previous
        if record.previous != before:
            yield AuditFinding(
                AUDIT_FILE,
                f"{record.name} was written after another record {seq - 1} than the one in the file: one of them was "
                "replaced",
            )


def _check_head(chain: ChainFile, intact: Sequence[tuple[int, AuditRecord]]) -> Iterator[AuditFinding]:
    if not isinstance(chain.head, Head):
        yield AuditFinding(HEAD_FILE, chain.head)
        return
    last = next((record for _, record in intact if record.seq == chain.head.num_records - 1), None)
    if last is not None and last.sha256 != chain.head.sha256:
        yield AuditFinding(HEAD_FILE, f"{last.name} has another sha256 than the one noted here: it was replaced")
    if chain.head.num_records == 0 and chain.head.sha256 != GENESIS:
        yield AuditFinding(HEAD_FILE, "it has a digest and counts no record")
    is_last_line = last is not None and chain.lines and chain.lines[-1].record in (last, None)
    if is_last_line and last is not None and len(chain.lines) == chain.head.num_records:
        end = chain.lines[-1].end
        if end != chain.head.num_bytes:
            yield AuditFinding(HEAD_FILE, f"it counts {chain.head.num_bytes} bytes, and the file has {end}")
    beyond = [record for _, record in intact if record.seq > chain.head.num_records]  # one may follow: a killed writer
    if beyond:
        yield AuditFinding(
            HEAD_FILE, f"it counts {chain.head.num_records} records, and {beyond[0].name} is beyond them"
        )


def _check_signatures(chain: ChainFile, key: SigningKey | None) -> Iterator[AuditFinding]:
    """Yields records and head that the holder of the key did not write."""
    records = chain.records
    signed = [record for record in records if record.hmac]
    if key is None:
        if signed:
            yield AuditFinding(
                AUDIT_FILE, "its records are signed, and no key was given: name its variable by --key-env"
            )
        return
    wrong = [record for record in signed if not key.signed(record.sha256, record.hmac)]
    for records_of, fault in (
        ([record for record in records if not record.hmac], "are not signed"),
        (wrong, "were signed with another key"),
    ):
        if records_of:
            first = f"the first is {records_of[0].name}"
            yield AuditFinding(AUDIT_FILE, f"{len(records_of)} of {len(records)} records {fault}: {first}")
    if isinstance(chain.head, Head) and not key.signed(chain.head.text, chain.head.hmac):
        yield AuditFinding(HEAD_FILE, "it was not signed with this key: records after its end may have been removed")


def _check_noted(chain: ChainFile, path: Path) -> Iterator[AuditFinding]:
    """The log of the run has the newest digest at each checkpoint and at the end."""
    by_number = {record.seq: record.sha256 for record in chain.records}
    for line in _lines(path):
        noted = NOTED.match(line.decode(errors="replace").rstrip("\n"))
        if noted is None:
            continue
        seq, digest = int(noted[1]) - 1, noted[2]
        if seq not in by_number:
            yield AuditFinding(path.name, f"it notes {seq + 1} records, and record {seq} is missing: the chain was cut")
        elif by_number[seq] != digest:
            yield AuditFinding(path.name, f"it notes {digest} for record {seq}, which is another one: it was replaced")


def _check_config(history: History, folder: Path, known: set[str]) -> Iterator[AuditFinding]:
    """A part writes its configuration when it has loaded the checkpoint, just before that record."""
    known.add(CONFIG_FILE)
    parts = [part for part in history.parts if part.started is not None]
    accepted = max((n for n, part in enumerate(parts) if part.is_accepted), default=0)
    digests = [part.started.body["config_sha256"] for part in parts[accepted:] if part.started is not None]
    path = folder / CONFIG_FILE
    if (fault := _fault_of_kind(folder, CONFIG_FILE)) is not None:
        yield AuditFinding(CONFIG_FILE, fault)
    elif digests and file_sha256(path) not in digests:
        yield AuditFinding(CONFIG_FILE, "it was altered: the first record of the part has another sha256")


def _check_metrics(history: History, folder: Path, known: set[str]) -> Iterator[AuditFinding]:
    """The file has the lines that the newest part kept, then a line for each of its records."""
    known.add(METRICS_FILE)
    started = history.parts[-1].started
    if started is None:
        return
    kept = started.body["metrics"]
    lines = _lines(folder / METRICS_FILE)
    head, rest = lines[: kept["num_lines"]], lines[kept["num_lines"] :]
    if _sha256_of(head) != kept["sha256"]:
        yield AuditFinding(
            METRICS_FILE, f"its first {kept['num_lines']} lines are not as an earlier part had written them"
        )
    expected = list(history.metrics)
    if history.ended is None and len(rest) == len(expected) - 1:
        expected.pop()  # the process was killed between the record and its line
    digests = [_sha256_of([line]) for line in rest]
    names = [(record.body["sha256"], f"the line of {record.name} ({record.body['of']})") for record in expected]
    yield from _check_lines(METRICS_FILE, digests, names, "its sha256", kept["num_lines"])
    seq_of = {record.body["sha256"]: record.seq for record in expected}
    order = [seq_of[digest] for digest in digests if digest in seq_of]
    if order != sorted(set(order)):
        yield AuditFinding(
            METRICS_FILE, "lines were moved or stand twice: they are in another order than their records"
        )


def _check_faults(history: History, folder: Path, known: set[str]) -> Iterator[AuditFinding]:
    known.add(FAULTS_FILE)
    losses = [loss for part in history.parts for loss in part.losses]
    written = [line.decode(errors="replace") for line in _lines(folder / FAULTS_FILE)]
    expected = [fault_line(Fault(**loss)) + "\n" for loss in losses]
    if history.ended is None and written == expected[:-1]:
        return  # the process was killed between the record and its line
    names = [(line, f"the loss of {loss['worker']}") for line, loss in zip(expected, losses, strict=True)]
    yield from _check_lines(FAULTS_FILE, written, names, "this loss")
    if sorted(written) == sorted(expected) and written != expected:
        yield AuditFinding(FAULTS_FILE, "lines were moved: they are in another order than their records")


def _check_lines(
    file: str, written: Sequence[str], names: Sequence[tuple[str, str]], content: str, first: int = 0
) -> Iterator[AuditFinding]:
    """Compares the lines after the first `first` with those of the records; `names` has each line and its name."""
    known, present = {line for line, _ in names}, set(written)
    for number, line in enumerate(written, start=first + 1):
        if line not in known:
            yield AuditFinding(file, f"line {number} was altered or added: no record has {content}")
    for line, name in names:
        if line not in present:
            yield AuditFinding(file, f"{name} is missing or altered")


def _check_checkpoints(history: History, folder: Path, known: set[str]) -> Iterator[AuditFinding]:
    root = folder / CHECKPOINTS
    present = versions_in(root)
    saved = history.checkpoints
    newest = max(saved, default=-1)
    for version in present:
        name = f"{CHECKPOINTS}/{checkpoint_folder(root, version).name}"
        if version in saved:
            yield from _check_checkpoint(folder, name, version, saved[version].record, known)
        elif version < newest or history.ended is not None:
            # A process killed between a checkpoint and its record leaves one that is newer than the newest record.
            yield AuditFinding(name, "no record has this checkpoint")
    if newest >= 0:
        kept = saved[newest].record.body.get("kept", [newest])
        for version in sorted(set(kept) - set(present)):
            yield AuditFinding(f"{CHECKPOINTS}/{checkpoint_folder(root, version).name}", "this checkpoint is missing")


def _check_checkpoint(
    folder: Path, name: str, version: int, record: AuditRecord, known: set[str]
) -> Iterator[AuditFinding]:
    """Compares the manifest with its record, the files with the manifest, and the version inside with the name."""
    manifest = f"{name}/{MANIFEST_FILE}"
    known.add(manifest)
    if (fault := _fault_of_kind(folder, manifest)) is not None:
        yield AuditFinding(name, f"{MANIFEST_FILE}: {fault}")
        return
    if file_sha256(folder / manifest) != record.body["manifest"]:
        yield AuditFinding(name, f"its {MANIFEST_FILE} is not the one of {record.name}")
    try:
        entries = json.loads((folder / manifest).read_bytes())["files"]
        files = {str(file): (int(row["num_bytes"]), str(row["sha256"])) for file, row in entries.items()}
        inside = json.loads((folder / name / STATE_FILE).read_bytes())["version"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        yield AuditFinding(name, f"its {MANIFEST_FILE} or {STATE_FILE} cannot be read ({type(error).__name__})")
        return
    if inside != version:
        yield AuditFinding(name, f"it has the state of version {inside}")
    for file, (num_bytes, sha256) in files.items():
        known.add(f"{name}/{file}")
        yield from _check_file(folder, f"{name}/{file}", num_bytes, sha256, file=name)


def _check_logged(history: History, folder: Path, known: set[str]) -> Iterator[AuditFinding]:
    for record in history.logged.values():
        known.add(record.body["file"])
        if record.body["version"] in history.steps:
            yield from _check_file(folder, record.body["file"], record.body["num_bytes"], record.body["sha256"])


def _check_covers(history: History, folder: Path, known: set[str]) -> Iterator[AuditFinding]:
    present = [name for name in history.covers if is_segment(name) and (folder / name).is_file()]
    for name, cover in history.covers.items():
        is_dropped = name in history.droppable and name < min(present, default="~")
        if history.ended is None and is_dropped and not (folder / name).exists():
            continue  # a checkpoint has its groups
        known.add(name)
        if cover.instead is not None and not list(
            _check_file(folder, name, cover.instead.num_bytes, cover.instead.sha256)
        ):
            continue  # the process was killed between the record and its file
        newest: Cover | None = cover
        while newest is not None:
            yield from _check_file(folder, name, newest.num_bytes, newest.sha256, is_whole=newest.is_whole)
            newest = newest.earlier


def _check_others(history: History, folder: Path, known: set[str], uncovered: list[str]) -> Iterator[AuditFinding]:
    """Yields links and files that were added to a closed run; adds those that no record has to `uncovered`."""
    ended = history.ended
    others = () if ended is None or ended.body.get("covers_all") else FORMERLY_UNCOVERED
    for name in files_below(folder):
        parts = PurePosixPath(name).parts
        if (folder / name).is_symlink() and not is_uncovered(name):
            yield AuditFinding(name, "it is a symbolic link, so its content may lie outside the run folder")
        elif name in known or name.startswith("audit."):
            continue
        elif ended is None or is_uncovered(name) or parts[0] in others or (others and parts[-1].startswith(".")):
            uncovered.append(name)
        elif parts[0] in (CHECKPOINTS, TRAJECTORIES) and parts[1].startswith("."):
            uncovered.append(name)  # a draft of a process that was killed
        else:
            yield AuditFinding(name, "it was added: no record has this file")


def _check_file(
    folder: Path, name: str, num_bytes: int, sha256: str, *, is_whole: bool = True, file: str = ""
) -> Iterator[AuditFinding]:
    """`file` names the finding, if it is not `name`."""
    said = f"{name.removeprefix(f'{file}/')}: " if file else ""
    fault, path = _fault_of_kind(folder, name), folder / name
    if fault is None:
        size = path.stat().st_size
        if size < num_bytes or (is_whole and size != num_bytes):
            fault = f"it has {size} bytes, and had {num_bytes}"
        elif file_sha256(path, num_bytes) != sha256:
            start = "" if is_whole else f"among its first {num_bytes} bytes "
            fault = f"it was altered: {start}it has another sha256 than the run recorded"
    if fault is not None:
        yield AuditFinding(file or name, f"{said}{fault}")


def _fault_of_kind(folder: Path, name: str) -> str | None:
    """Returns why `name` is no file of the run folder; None if it is one."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        return "a record names it, and it lies outside the run folder"
    for part in [*reversed(path.parents), path][1:]:
        if (folder / part).is_symlink():
            return f"{part} is a symbolic link"
    if (folder / name).is_dir():
        return "it is a folder"
    return None if (folder / name).is_file() else "it is missing"


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True) if path.is_file() else []


def _sha256_of(lines: Sequence[bytes]) -> str:
    return hashlib.sha256(b"".join(lines)).hexdigest()

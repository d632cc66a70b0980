"""Compares the files of a run folder with the digests that its chain has of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mobula.cluster.audit.chain import AuditRecord
from mobula.cluster.audit.files import file_sha256
from mobula.cluster.audit.history import History
from mobula.cluster.audit.order import AuditFinding
from mobula.cluster.metrics.report.run_folder import METRICS_FILE
from mobula.cluster.recovery.checkpoints import MANIFEST_FILE, checkpoint_folder, fault_of, versions_in
from mobula.cluster.workers.faults import FAULTS_FILE, Fault, fault_line


def check_files(history: History, folder: Path, checkpoints: Path) -> Iterator[AuditFinding]:
    """Yields every file that is not as the run wrote it."""
    yield from _check_metrics(history, folder / METRICS_FILE)
    yield from _check_faults(history, folder / FAULTS_FILE)
    yield from _check_checkpoints(history, checkpoints)
    yield from _check_logged(history, folder)
    if history.ended is not None:
        yield from _check_ended(history.ended.body["files"], folder)


def _check_metrics(history: History, path: Path) -> Iterator[AuditFinding]:
    """The file has the lines that the newest part kept, then a line for each of its records."""
    started = history.parts[-1].started
    if started is None:
        return
    kept = started.body["metrics"]
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    head, rest = lines[: kept["num_lines"]], lines[kept["num_lines"] :]
    if _sha256_of(head) != kept["sha256"]:
        yield AuditFinding(
            METRICS_FILE, f"its first {kept['num_lines']} lines are not as an earlier part had written them"
        )
    expected = list(history.metrics)
    if history.ended is None and len(rest) == len(expected) - 1:
        expected.pop()  # the process was killed between the record and its line
    yield from _compare_lines(METRICS_FILE, rest, expected, kept["num_lines"])


def _compare_lines(
    file: str, lines: Sequence[bytes], expected: Sequence[AuditRecord], first: int
) -> Iterator[AuditFinding]:
    digests = [_sha256_of([line]) for line in lines]
    known = {record.body["sha256"]: record for record in expected}
    for number, digest in enumerate(digests, start=first + 1):
        if digest not in known:
            yield AuditFinding(file, f"line {number} was altered or added: no record has its sha256")
    for record in expected:
        if record.body["sha256"] not in digests:
            yield AuditFinding(file, f"the line of {record.name} ({record.body['of']}) is missing or altered")
    order = [known[digest].seq for digest in digests if digest in known]
    if order != sorted(set(order)):
        yield AuditFinding(file, "lines were moved or stand twice: they are in another order than their records")


def _check_faults(history: History, path: Path) -> Iterator[AuditFinding]:
    losses = [loss for part in history.parts for loss in part.losses]
    written = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if path.is_file() else []
    expected = [fault_line(Fault(**loss)) for loss in losses]
    if history.ended is None and written == expected[:-1]:
        return  # the process was killed between the record and its line
    for number, line in enumerate(written, start=1):
        if line not in expected:
            yield AuditFinding(FAULTS_FILE, f"line {number} was altered or added: no record has this loss")
    for line in expected:
        if line not in written:
            yield AuditFinding(FAULTS_FILE, f"the loss of {json.loads(line)['worker']} is missing or altered")
    if sorted(written) == sorted(expected) and written != expected:
        yield AuditFinding(FAULTS_FILE, "lines were moved: they are in another order than their records")


def _check_checkpoints(history: History, folder: Path) -> Iterator[AuditFinding]:
    present = versions_in(folder)
    saved = history.checkpoints
    newest = max(saved, default=-1)
    for version in present:
        path = checkpoint_folder(folder, version)
        named = f"{folder.name}/{path.name}"
        if version not in saved:
            # A process killed between a checkpoint and its record leaves one that is newer than the newest record.
            if version < newest or history.ended is not None:
                yield AuditFinding(named, "no record has this checkpoint")
            continue
        manifest = path / MANIFEST_FILE
        if not manifest.is_file() or file_sha256(manifest) != saved[version].record.body["manifest"]:
            yield AuditFinding(named, f"its {MANIFEST_FILE} is not the one of {saved[version].record.name}")
        elif (fault := fault_of(path)) is not None:
            yield AuditFinding(named, fault)
    if newest >= 0:
        kept = saved[newest].record.body.get("kept", [newest])
        for version in sorted(set(kept) - set(present)):
            yield AuditFinding(f"{folder.name}/{checkpoint_folder(folder, version).name}", "this checkpoint is missing")


def _check_logged(history: History, folder: Path) -> Iterator[AuditFinding]:
    for record in history.logged.values():
        if record.body["version"] in history.steps:
            yield from _check_file(folder, record.body["file"], record.body["num_bytes"], record.body["sha256"])


def _check_ended(files: dict[str, Any], folder: Path) -> Iterator[AuditFinding]:
    for name, (num_bytes, sha256) in files.items():
        yield from _check_file(folder, name, num_bytes, sha256)


def _check_file(folder: Path, name: str, num_bytes: int, sha256: str) -> Iterator[AuditFinding]:
    path = folder / name
    if not path.is_file():
        yield AuditFinding(name, "it is missing")
    elif path.stat().st_size != num_bytes:
        yield AuditFinding(name, f"it has {path.stat().st_size} bytes, and had {num_bytes}")
    elif file_sha256(path) != sha256:
        yield AuditFinding(name, "it was altered: it has another sha256 than the run recorded")


def _sha256_of(lines: Sequence[bytes]) -> str:
    return hashlib.sha256(b"".join(lines)).hexdigest()

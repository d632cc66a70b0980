"""Checks that no record of a chain was altered, removed, added, replaced or moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from mobula.cluster.audit.chain import AUDIT_FILE, GENESIS, HEAD_FILE, AuditRecord, Head, Line


@dataclass(frozen=True)
class AuditFinding:
    """Something that the audit found wrong, in `file` of the run folder."""

    file: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}: {self.message}"


@dataclass(frozen=True)
class ChainFile:
    """The content of `audit.jsonl` and of `audit.head`, or the reason why the head cannot be used."""

    lines: Sequence[Line]
    num_torn_bytes: int
    head: Head | str

    @property
    def records(self) -> list[AuditRecord]:
        """The undamaged records, in the order of their numbers, each once."""
        by_number = {line.record.seq: line.record for line in self.lines if line.record}
        return [by_number[seq] for seq in sorted(by_number)]

    @property
    def has_torn_end(self) -> bool:
        """Whether the last bytes are a record that a killed process had not completed."""
        end = self.lines[-1].end if self.lines else 0
        return self.num_torn_bytes > 0 and isinstance(self.head, Head) and end >= self.head.num_bytes


def check_order(chain: ChainFile) -> Iterator[AuditFinding]:
    """Yields every fault of the chain; empty if it is as it was written."""
    intact = [(line.number, line.record) for line in chain.lines if line.record]
    present = Counter(record.seq for _, record in intact)
    num_counted = chain.head.num_records if isinstance(chain.head, Head) else 0
    absent = sorted(set(range(max([num_counted, *(seq + 1 for seq in present)]))) - present.keys())
    damaged = _damaged(chain.lines, absent)
    for line, seq in damaged:
        absent = [number for number in absent if number != seq]
        yield AuditFinding(AUDIT_FILE, f"record {seq} (line {line.number}) was altered: {line.fault}")
    if chain.num_torn_bytes and not chain.has_torn_end:
        number = absent.pop() if absent else len(chain.lines)
        yield AuditFinding(
            AUDIT_FILE, f"record {number} was altered: its line has no end ({chain.num_torn_bytes} bytes)"
        )
    for first, last in _ranges(absent):
        named = f"record {first} is" if first == last else f"records {first} to {last} are"
        yield AuditFinding(AUDIT_FILE, f"{named} missing")
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


def _damaged(lines: Sequence[Line], absent: Sequence[int]) -> list[tuple[Line, int]]:
    """Returns the damaged lines with the number of the record that each was, by its place."""
    found: list[tuple[Line, int]] = []
    expected = 0
    for line in lines:
        if line.record is not None:
            expected = line.record.seq + 1
            continue
        found.append((line, next((seq for seq in absent if seq >= expected), expected)))
        expected = found[-1][1] + 1
    return found


def _ranges(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        yield members[0], members[-1]


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

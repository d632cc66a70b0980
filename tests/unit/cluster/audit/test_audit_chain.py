"""The hash chain of a run: whatever is altered, dropped or moved in its files is found and named."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from audited import audited, audited_run, whole_run
from hypothesis import given, settings
from hypothesis import strategies as st

from mobula.cluster.audit.chain import AUDIT_FILE, HEAD_FILE, AuditKind, AuditRecord, encode
from mobula.cluster.audit.history import Comparison, Descent, PromptLedger, account_of, compare
from mobula.cluster.audit.writer import FORMERLY_UNCOVERED, ChainWriter, recorded_files
from mobula.cluster.errors import PreflightError
from mobula.cluster.metrics.guard_events import GuardEvent

# Written by the code of 2026-11-27, before records had checksums of weights and signatures: a run of fakes that was
# killed after its first step, and resumed.
EARLIER = Path(__file__).parents[3] / "support" / "recorded_runs" / "audited"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whole_run(tmp_path_factory.mktemp("audited") / "run")


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def covered(folder: Path) -> list[Path]:
    """Every file whose content the chain covers."""
    checkpoints = [path for path in (folder / "checkpoints").rglob("*") if path.is_file()]
    return [folder / AUDIT_FILE, folder / HEAD_FILE, *recorded_files(folder), *sorted(checkpoints)]


def edited(path: Path, edit: Callable[[list[bytes]], None]) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    edit(lines)
    path.write_bytes(b"".join(lines))


def test_a_whole_run_has_no_finding_and_its_figures(run: Path) -> None:
    result = audited(run)
    assert result.findings == []
    history = result.history
    assert (history.version, [part.status for part in history.parts]) == (4, ["done", "done"])
    assert [part.resumed_from for part in history.parts] == [None, 2]
    assert [history.descent(version) for version in sorted(history.checkpoints)] == [
        Descent(0, ()), Descent(0, (1, 2)), Descent(2, (3, 4)),
    ]  # fmt: skip
    assert history.receipts == {"rollout/0": {"checksum+canary": 6}, "rollout/1": {"checksum": 6}}


@settings(max_examples=100)
@given(data=st.data())
def test_a_flipped_bit_is_found_in_its_file(run: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(covered(run)), label="file")
    content = path.read_bytes()
    bit = data.draw(st.integers(0, 8 * len(content) - 1), label="bit")
    altered = bytearray(content)
    altered[bit // 8] ^= 1 << bit % 8
    path.write_bytes(altered)
    try:
        findings = audited(run).findings
    finally:
        path.write_bytes(content)
    name = str(path.relative_to(run))
    assert [finding for finding in findings if name.startswith(finding.file)], findings
    if path.name == AUDIT_FILE:
        number = content[: bit // 8].count(b"\n")
        assert any(f"record {number}" in finding.message for finding in findings), findings
    assert audited(run).findings == []


def test_every_prompt_was_trained_or_rejected_or_is_named(run: Path) -> None:
    history = audited(run).history
    account = account_of(history)
    assert set(account.trained) == {group for step in history.steps.values() for group in step.groups}
    assert account.rejected == () and account.lost == ()
    assert account.num == len({*account.trained, *account.open})
    assert account.num >= 8


def test_rejected_prompts_have_their_reasons(tmp_path: Path) -> None:
    def values(prompt_id: str) -> tuple[float | None, ...]:
        return (1.0, 1.0) if int(prompt_id.split("/")[1]) % 3 == 0 else (0.0, 1.0)

    run, audit = audited_run(tmp_path, total_steps=3, drop_uniform=True, values=values)
    asyncio.run(run.go())
    audit.ended("done", 3)
    result = audited(tmp_path)
    assert result.findings == []
    account = account_of(result.history)
    assert {reason for _, reason in account.rejected} == {"uniform"}
    assert {int(i.split("/")[1]) % 3 for i, _ in account.rejected} == {0}
    assert len(account.trained) == 6


def test_prompts_of_a_killed_part_are_trained_later_or_named(tmp_path: Path) -> None:
    whole_run(tmp_path, 4)
    history = audited(tmp_path).history
    killed = PromptLedger()
    killed.begin_part()
    killed.add(["a", "b", "c", "d"], [("d", "uniform")])
    killed.begin_part()
    killed.continued(["b"], ["a"])
    account = killed.account(["a"])
    assert (account.trained, account.open, account.lost) == (("a",), ("b",), ("c",))
    assert account.rejected == (("d", "uniform"),)
    assert account_of(history).lost == ()


def test_a_group_that_was_trained_and_never_handed_out_is_found() -> None:
    ledger = PromptLedger()
    ledger.begin_part()
    ledger.add(["a"], [])
    assert ledger.unknown(["a", "x"]) == ["x"]


def test_a_dropped_record_is_named(run: Path, copy: Path) -> None:
    records = (run / AUDIT_FILE).read_bytes().splitlines(keepends=True)
    for number in range(len(records)):
        (copy / AUDIT_FILE).write_bytes(b"".join(records[:number] + records[number + 1 :]))
        assert f"{AUDIT_FILE}: record {number} is missing" in map(str, audited(copy).findings)


def test_moved_records_are_named(run: Path, copy: Path) -> None:
    records = (run / AUDIT_FILE).read_bytes().splitlines(keepends=True)
    rng = random.Random(0)
    for _ in range(50):
        one, other = sorted(rng.sample(range(len(records)), 2))
        moved = list(records)
        moved[one], moved[other] = moved[other], moved[one]
        (copy / AUDIT_FILE).write_bytes(b"".join(moved))
        messages = [finding.message for finding in audited(copy).findings if "records were moved" in finding.message]
        assert any(f"record {one} " in message for message in messages)
        assert any(f"record {other} " in message for message in messages)


def test_lines_of_the_metrics_that_are_dropped_or_moved_are_named(run: Path, copy: Path) -> None:
    path = copy / "metrics.jsonl"
    edited(path, lambda lines: lines.__delitem__(slice(3, 4)))
    messages = [finding.message for finding in audited(copy).findings if finding.file == path.name]
    assert any("version 4" in message for message in messages)
    shutil.copy(run / path.name, path)
    edited(path, lambda lines: lines.reverse())
    assert path.name in {finding.file for finding in audited(copy).findings}


def test_a_record_that_was_rewritten_with_its_digest_is_found_by_its_successor(run: Path, copy: Path) -> None:
    result = audited(copy)
    step = next(step for step in result.history.steps.values() if step.record.body["version"] == 2)
    forged, _ = encode(step.record.seq, step.record.previous, step.record.at_s, "trained", {**step.record.body, "x": 1})
    edited(copy / AUDIT_FILE, lambda lines: lines.__setitem__(step.record.seq, forged))
    assert any("one of them was replaced" in finding.message for finding in audited(copy).findings)


def test_a_chain_that_was_rewritten_from_one_record_on_lacks_a_digest_that_was_noted(run: Path, copy: Path) -> None:
    noted = audited(run).newest.sha256
    assert audited(run, noted).findings == []
    (copy / AUDIT_FILE).unlink()
    (copy / HEAD_FILE).unlink()
    shutil.rmtree(copy / "checkpoints")
    whole_run(copy)
    assert audited(copy).findings == []
    assert any(noted in finding.message for finding in audited(copy, noted).findings)


def test_a_half_written_last_record_is_no_finding_and_the_next_part_removes_it(tmp_path: Path) -> None:
    writer = ChainWriter(tmp_path)
    for version in range(3):
        writer.record(AuditKind.ADMITTED, {"engine": "rollout/0", "version": version})
    head = writer.head
    line, _ = encode(3, head.sha256, 0.0, "admitted", {"engine": "rollout/0", "version": 3})
    with (tmp_path / AUDIT_FILE).open("ab") as file:
        file.write(line[:40])
    again = ChainWriter(tmp_path)
    assert (again.found.torn_bytes, again.found.head, again.head) == (40, None, head)


def test_a_record_that_a_killed_writer_had_not_counted_is_kept(tmp_path: Path) -> None:
    writer = ChainWriter(tmp_path)
    writer.record(AuditKind.LOST, {})
    before = (tmp_path / HEAD_FILE).read_bytes()
    writer.record(AuditKind.LOST, {})
    (tmp_path / HEAD_FILE).write_bytes(before)
    again = ChainWriter(tmp_path)
    assert (again.found.head, again.head.num_records) == (None, 2)


def test_records_that_are_gone_when_a_run_is_resumed_stay_a_finding(tmp_path: Path) -> None:
    folder = whole_run(tmp_path / "run")
    edited(folder / AUDIT_FILE, lambda lines: lines.__delitem__(slice(-3, None)))
    _, audit = audited_run(folder, total_steps=4)
    audit.resumed(4)
    assert any("audit.head said" in finding.message for finding in audited(folder).findings)


def test_a_folder_without_a_chain_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=r"metrics\.audit=true"):
        audited(tmp_path)


def test_a_rollback_leaves_out_the_steps_whose_weights_it_replaced(run: Path) -> None:
    history = audited(run).history
    event = GuardEvent(3, "judge", "rollback", 2.0, 2, "the judge falls", 1.0, restored=2)
    history.add(AuditRecord(99, "", 0.0, "rolled_back", asdict(event), ""))
    assert history.descent(4) == Descent(2, (4,))
    assert history.findings == []
    history.add(AuditRecord(100, "", 0.0, "rolled_back", asdict(replace(event, restored=1)), ""))
    assert "no record has a checkpoint" in history.findings[0].message


def test_the_first_group_that_differs_between_two_runs_is_named(run: Path, tmp_path: Path) -> None:
    whole_run(tmp_path / "equal")
    ours, equal = audited(run).history, audited(tmp_path / "equal").history
    assert compare(ours, equal) == Comparison(4, 4, "", None)
    step = equal.steps[3]
    first = next(iter(step.groups))
    equal.steps[3] = replace(step, groups=dict.fromkeys(step.groups, "0" * 64))
    assert compare(ours, equal) == Comparison(2, 4, f"{first}, with other content", None)


def test_the_chain_of_an_earlier_version_verifies_and_lists_what_it_did_not_cover() -> None:
    result = audited(EARLIER)
    assert result.findings == []
    assert (result.num_records, result.history.version, result.is_closed, result.is_signed) == (16, 2, True, False)
    assert [(part.status, part.resumed_from) for part in result.history.parts] == [(None, None), ("done", 1)]
    assert list(result.uncovered) == [
        "diagnosis.json", "logs/learner-0.log", "report.html", "run.log", "tensorboard/events",
    ]  # fmt: skip


def test_an_altered_or_added_file_of_an_earlier_version_is_named(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(EARLIER, tmp_path / "run"))
    for path in [path for path in covered(EARLIER) if path.relative_to(EARLIER).parts[0] not in FORMERLY_UNCOVERED]:
        name = str(path.relative_to(EARLIER))
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content)
        assert any(name.startswith(finding.file) for finding in audited(folder).findings), name
        shutil.copy(path, folder / name)
    (folder / "policy" / "pytorch_model.bin").write_bytes(b"other")
    assert [finding.file for finding in audited(folder).findings] == ["policy/pytorch_model.bin"]


def test_the_chain_of_an_earlier_version_is_continued(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(EARLIER, tmp_path / "run"))
    run, audit = audited_run(folder, total_steps=4, checkpoint_interval=1)
    asyncio.run(run.go())
    audit.ended("done", 4)
    result = audited(folder)
    assert (result.findings, result.uncovered) == ([], ["diagnosis.json", "report.html"])
    assert [part.resumed_from for part in result.history.parts] == [None, 1, 2]
    assert sorted(result.history.steps) == [1, 2, 3, 4]

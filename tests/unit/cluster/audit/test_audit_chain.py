"""The audit: what the chain of a run states, and every forgery that it finds."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import CONFIG, audited, audited_run, rewrite_chain, whole_run

from mobula.cluster.audit.chain import (
    AUDIT_FILE,
    FORMERLY_UNCOVERED,
    HEAD_FILE,
    AuditKind,
    AuditRecord,
    ChainWriter,
    Head,
    SigningKey,
    encode,
    recorded_files,
    signing_key,
)
from mobula.cluster.audit.history import Comparison, Descent, History, account_of, check_prompts, compare
from mobula.cluster.errors import PreflightError
from mobula.cluster.metrics.guard_events import GuardEvent

# Written by the code of 2026-11-27, before records had checksums of weights and signatures: a run of fakes that was
# killed after its first step, and resumed.
EARLIER = Path(__file__).parents[3] / "support" / "recorded_runs" / "audited"


KEY, OTHER_KEY = SigningKey("k" * 32), SigningKey("o" * 32)

LOG_LINE = "2026-11-28 18:50:00,635 INFO mobula.cluster.audit.observer: audit at the end: {num} records, sha256 {sha}\n"


def filled(folder: Path, key: SigningKey | None = None) -> Path:
    """A whole run with the other files of a run, which noted its newest digest in its log."""
    for name in ("samples.jsonl", "policy/model.safetensors", "tensorboard/events", "logs/learner-0.log", "run.log"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name}\n")
    whole_run(folder, key=key)
    with (folder / "run.log").open("a") as log:
        log.write(LOG_LINE.format(num=len(records(folder)), sha=records(folder)[-1]["sha256"]))
    return folder


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / AUDIT_FILE).read_bytes().splitlines()]


def cut(folder: Path, num: int) -> None:
    """Removes the last records and counts the rest in the head."""
    rewrite_chain(folder, records(folder)[:-num])


def named(folder: Path) -> dict[str, str]:
    return {finding.file: finding.message for finding in audited(folder).findings}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return filled(tmp_path_factory.mktemp("audited") / "run")


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def covered(folder: Path) -> list[Path]:
    """Every file whose content the chain covers."""
    checkpoints = [path for path in (folder / "checkpoints").rglob("*") if path.is_file()]
    files = [path for path in recorded_files(folder) if path.name != "run.log"]  # which may grow after the end
    return [folder / AUDIT_FILE, folder / HEAD_FILE, *files, *sorted(checkpoints)]


def damage(path: Path) -> Path:
    """Changes a byte in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)
    return path


def edited(path: Path, edit: Callable[[list[bytes]], None]) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    edit(lines)
    path.write_bytes(b"".join(lines))


def test_a_whole_run_has_no_finding_and_its_figures(run: Path) -> None:
    result = audited(run)
    assert (result.findings, result.is_closed, result.is_signed, list(result.uncovered)) == ([], True, False, [])
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
    names = (
        (name, AUDIT_FILE) if name == HEAD_FILE else (name,)
    )  # a head that counts more reads as a chain that was cut
    assert [finding for finding in findings if any(each.startswith(finding.file) for each in names)], findings
    if path.name == AUDIT_FILE:
        number = content[: bit // 8].count(b"\n")
        assert any(f"record {number}" in finding.message for finding in findings), findings
    assert audited(run).findings == []


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


STARTED = {
    "code": {"version": "1", "commit": ""}, "bounds": {"max_staleness": 0, "stragglers": "wait"},
    "found": {"torn_bytes": 0, "num_records": 0, "head": None}, "metrics": {"num_lines": 0, "sha256": ""},
    "config_sha256": "", "run": "r", "seed": 0,
}  # fmt: skip


def history_of(*records: tuple[str, dict[str, Any]]) -> History:
    history = History()
    for seq, (kind, body) in enumerate(records):
        history.add(AuditRecord(seq, "", 0.0, kind, body, ""))
    assert history.findings == []
    return history


def test_prompts_of_a_killed_part_are_trained_later_or_named(run: Path) -> None:
    step = {"version": 1, "source": "new", "groups": [["a", "", {"0": 3}]], "rejected": [["d", "uniform"]]}
    killed = history_of(
        ("started", STARTED),
        ("trained", {**step, "handed_out": ["a", "b", "c", "d"]}),
        ("started", STARTED),
        ("recovered", {"version": 1, "pending": ["b"], "settled": ["a"]}),
    )
    account = account_of(killed)
    assert (account.trained, account.open, account.lost) == (("a",), ("b",), ("c",))
    assert account.rejected == (("d", "uniform"),)
    assert account_of(audited(run).history).lost == ()


def test_a_group_that_was_trained_and_never_handed_out_is_found() -> None:
    groups = [[group_id, "", {"0": 3}] for group_id in ("a", "x")]
    step = {"version": 1, "source": "new", "groups": groups, "handed_out": ["a"]}
    [finding] = check_prompts(history_of(("started", STARTED), ("trained", step)))
    assert "prompts x were trained or rejected, and never handed out" in finding.message


def test_a_dropped_record_is_named(run: Path, copy: Path) -> None:
    lines = (run / AUDIT_FILE).read_bytes().splitlines(keepends=True)
    for number in range(len(lines)):
        (copy / AUDIT_FILE).write_bytes(b"".join(lines[:number] + lines[number + 1 :]))
        assert f"{AUDIT_FILE}: record {number} is missing" in map(str, audited(copy).findings)


def test_moved_records_are_named(run: Path, copy: Path) -> None:
    lines = (run / AUDIT_FILE).read_bytes().splitlines(keepends=True)
    rng = random.Random(0)
    for _ in range(50):
        one, other = sorted(rng.sample(range(len(lines)), 2))
        moved = list(lines)
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
    (copy / "run.log").unlink()  # it noted another digest
    shutil.rmtree(copy / "checkpoints")
    whole_run(copy)
    assert audited(copy).findings == []
    assert any(noted in finding.message for finding in audited(copy, noted).findings)


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
        damage(folder / name)
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


@pytest.mark.parametrize(
    "name",
    ["policy/pytorch_model.bin", "summary2.json", ".hidden", "checkpoints/step-000004/extra.bin", "journal/x",
     "checkpoints/other/x", "trajectories/step-000001.parquet", "new/folder/x"],
)  # fmt: skip
def test_a_file_that_is_added_to_a_closed_run_is_named(copy: Path, name: str) -> None:
    (copy / name).parent.mkdir(parents=True, exist_ok=True)
    (copy / name).write_text("x")
    assert "added" in named(copy)[name]


@pytest.mark.parametrize("name", ["report.html", "diagnosis.json", "export/step-000004/model.safetensors", "run.lock"])
def test_files_of_other_commands_are_listed_and_no_finding(copy: Path, name: str) -> None:
    (copy / name).parent.mkdir(parents=True, exist_ok=True)
    (copy / name).write_text("x")
    result = audited(copy)
    assert (result.findings, list(result.uncovered)) == ([], [name])


@pytest.mark.parametrize("name", ["logs/learner-0.log", "run.log"])
def test_logs_may_grow_after_the_end_and_not_change(copy: Path, name: str) -> None:
    with (copy / name).open("a") as log:
        log.write("the worker ends\n")
    assert named(copy) == {}
    (copy / name).write_text("forged\n" * 20)
    assert name in named(copy)
    (copy / name).write_text("")
    assert "bytes" in named(copy)[name]


def test_a_run_without_its_last_record_is_not_closed_and_what_is_proven_still_holds(copy: Path) -> None:
    cut(copy, 1)
    (copy / "run.log").write_text("run.log\n")
    result = audited(copy)
    assert (result.findings, result.is_closed) == ([], False)
    assert {"policy/model.safetensors", "tensorboard/events"} <= set(result.uncovered)
    (copy / "config.yaml").write_text(CONFIG.replace("0", "1"))
    journal = damage(max((copy / "journal").iterdir()))
    assert set(named(copy)) == {"config.yaml", f"journal/{journal.name}"}


def test_records_that_the_log_noted_are_missed_in_a_cut_and_in_a_rewritten_chain(copy: Path) -> None:
    rows = records(copy)
    cut(copy, 2)
    assert "the chain was cut" in named(copy)["run.log"]
    rows[-1]["at_s"] += 1
    rewrite_chain(copy, rows)
    assert "it was replaced" in named(copy)["run.log"]


def test_samples_of_a_run_that_goes_on_are_covered_also_if_it_was_killed_before_their_file(tmp_path: Path) -> None:
    run, audit = audited_run(tmp_path, total_steps=2)
    path = tmp_path / "samples.jsonl"
    audit.write(path, "first\n")
    assert named(tmp_path) == {}
    audit.write(path, "second\n")
    path.write_text("first\n")
    assert named(tmp_path) == {}, "killed between record and file"
    path.write_text("other\n")
    assert "samples.jsonl" in named(tmp_path)
    path.write_text("second\n")
    asyncio.run(run.go())
    assert named(tmp_path) == {}
    path.write_text("first\n")
    assert "samples.jsonl" in named(tmp_path), "steps have followed"
    audited_run(tmp_path, total_steps=2)
    assert any("was not as record" in finding.message for finding in audited(tmp_path).findings)


def test_a_journal_that_changed_between_two_parts_stays_a_finding(tmp_path: Path) -> None:
    run, _ = audited_run(tmp_path, total_steps=3, checkpoint_interval=0)
    asyncio.run(run.go())
    journal = damage(max((tmp_path / "journal").iterdir()))
    audited_run(tmp_path, total_steps=3)
    assert f"journal/{journal.name}" in named(tmp_path)


def test_swapped_and_renamed_checkpoints_are_named_also_where_the_chain_was_rewritten(copy: Path) -> None:
    one, other = copy / "checkpoints/step-000002", copy / "checkpoints/step-000004"
    one.rename(copy / "aside")
    other.rename(one)
    (copy / "aside").rename(other)
    assert set(named(copy)) >= {"checkpoints/step-000002", "checkpoints/step-000004"}
    rows = records(copy)
    for row in rows:
        if row["kind"] in ("checkpoint", "resumed") and row["body"]["version"] in (2, 4):
            manifest = copy / f"checkpoints/step-{row['body']['version']:06d}/manifest.json"
            row["body"]["manifest"] = hashlib.sha256(manifest.read_bytes()).hexdigest()
    rewrite_chain(copy, rows)
    (copy / "run.log").write_text("run.log\n")
    assert named(copy)["checkpoints/step-000002"] == "it has the state of version 4"


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "samples.jsonl", "policy/model.safetensors", "policy", "config.yaml"]
)
def test_a_link_out_of_the_folder_is_named_although_its_content_is_the_same(copy: Path, name: str) -> None:
    aside = copy.parent / "aside"
    (copy / name).rename(aside)
    (copy / name).symlink_to(aside)
    assert any("symbolic link" in finding.message for finding in audited(copy).findings)


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "config.yaml", HEAD_FILE, "run.log"])
def test_a_folder_in_place_of_a_file_is_named(copy: Path, name: str) -> None:
    (copy / name).unlink()
    (copy / name).mkdir()
    assert name in named(copy)


def test_a_chain_that_is_no_file_is_refused(copy: Path) -> None:
    (copy / AUDIT_FILE).unlink()
    os.mkfifo(copy / AUDIT_FILE)
    with pytest.raises(PreflightError, match="no file"):
        audited(copy)


WRONG: list[Callable[[dict[str, Any]], Any]] = [
    lambda body: body.clear(),
    lambda body: body.update(version="x"),
    lambda body: body.update(version=10**30),
    lambda body: body.update(groups=[[1, 2, []]], receivers=[], files=[1], found=None, kept="x", code=1, bounds=None),
    lambda body: body.update(groups=[["a", "b", {"0": "many"}]], files={"../../etc/passwd": [0, "0"], "/etc": [0, ""]}),
    lambda body: body.update(handed_out=[[1]], rejected=[1], manifest=1, receivers={"a": 1}, journal={"x": 1}),
]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_chain_of_another_program_has_findings_and_no_traceback(copy: Path, wrong: Callable[..., Any]) -> None:
    rows = records(copy)
    for row in rows:
        wrong(row["body"])
    rewrite_chain(copy, rows)
    assert audited(copy).findings


def test_numbers_without_end_take_no_memory(copy: Path) -> None:
    large = 2**62
    line, digest = encode(large, "0" * 64, 0.0, "trained", {"version": large, "source": "new", "groups": []})
    (copy / AUDIT_FILE).write_bytes(line)
    (copy / HEAD_FILE).write_bytes(Head(large + 1, len(line), digest).encoded())
    result = audited(copy)
    assert any("are missing" in finding.message for finding in result.findings)
    assert result.history.descent(large) == Descent(large - 1, (large,))


def test_a_signed_chain_verifies_with_its_key_alone(tmp_path: Path) -> None:
    folder = filled(tmp_path / "run", key=KEY)
    result = audited(folder, key=KEY)
    assert (result.findings, result.is_signed) == ([], True)
    assert "no key was given" in audited(folder).findings[0].message
    result = audited(folder, key=OTHER_KEY)
    assert not result.is_signed
    assert {finding.file for finding in result.findings} == {AUDIT_FILE, HEAD_FILE}
    assert "were signed with another key" in result.findings[0].message


def test_a_forged_or_cut_chain_lacks_signatures(tmp_path: Path) -> None:
    folder = filled(tmp_path / "run", key=KEY)
    rows, lines = records(folder), (folder / AUDIT_FILE).read_bytes().splitlines(keepends=True)
    rewrite_chain(folder, rows)
    assert f"{len(rows)} of {len(rows)} records are not signed" in audited(folder, key=KEY).findings[0].message
    head = Head(len(lines) - 1, sum(map(len, lines[:-1])), rows[-2]["sha256"])
    (folder / AUDIT_FILE).write_bytes(b"".join(lines[:-1]))
    (folder / HEAD_FILE).write_bytes(head.encoded())
    (folder / "run.log").write_text("run.log\n")
    assert [finding.file for finding in audited(folder, key=KEY).findings] == [HEAD_FILE]


@pytest.mark.parametrize("key", [None, OTHER_KEY])
def test_a_signed_run_goes_on_with_its_key_alone(tmp_path: Path, key: SigningKey | None) -> None:
    ChainWriter(tmp_path, key=KEY).record(AuditKind.LOST, {})
    with pytest.raises(PreflightError, match=r"audit\.key_env"):
        ChainWriter(tmp_path, key=key)
    assert ChainWriter(tmp_path, key=KEY).head.num_records == 1


def test_the_key_leaves_the_environment_and_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "s3cret" * 8
    monkeypatch.setenv("RUN_KEY", secret)
    with signing_key("RUN_KEY") as key:
        assert "RUN_KEY" not in os.environ
        assert key is not None and secret not in f"{key} {key!r}"
        with pytest.raises(TypeError, match="stays in its process"):
            pickle.dumps(key)
    assert os.environ["RUN_KEY"] == secret


@pytest.mark.parametrize(("value", "problem"), [(None, "is not set"), ("short", "has 5 characters")])
def test_a_key_that_is_missing_or_short_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, value: str | None, problem: str
) -> None:
    monkeypatch.delenv("RUN_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("RUN_KEY", value)
    with pytest.raises(PreflightError, match=rf"audit\.key_env=RUN_KEY: .* {problem}"), signing_key("RUN_KEY"):
        pass

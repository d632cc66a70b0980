"""Forgeries of a run folder: each is named. Also the limits that the audit states: open runs, uncovered files, keys."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from audited import CONFIG, audited, audited_run, whole_run

from mobula.cluster.audit.chain import (
    AUDIT_FILE,
    HEAD_FILE,
    AuditKind,
    Head,
    SigningKey,
    encode,
    signing_key,
)
from mobula.cluster.audit.history import Descent
from mobula.cluster.audit.writer import ChainWriter
from mobula.cluster.errors import PreflightError

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


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return filled(tmp_path_factory.mktemp("forged") / "run")


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / AUDIT_FILE).read_bytes().splitlines()]


def rewrite(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Writes a chain of these records that is consistent in itself, as a forger without a key can."""
    previous, content = "0" * 64, b""
    for seq, row in enumerate(rows):
        line, previous = encode(seq, previous, row["at_s"], row["kind"], row["body"])
        content += line
    (folder / AUDIT_FILE).write_bytes(content)
    (folder / HEAD_FILE).write_bytes(Head(len(rows), len(content), previous).encoded())


def cut(folder: Path, num: int) -> None:
    """Removes the last records and counts the rest in the head."""
    rewrite(folder, records(folder)[:-num])


def named(folder: Path) -> dict[str, str]:
    return {finding.file: finding.message for finding in audited(folder).findings}


def test_a_run_with_all_its_files_has_no_finding(run: Path) -> None:
    result = audited(run)
    assert (result.findings, result.is_closed, result.is_signed, list(result.uncovered)) == ([], True, False, [])


@pytest.mark.parametrize(
    "name", ["policy/model.safetensors", "tensorboard/events", "logs/learner-0.log", "run.log", "config.yaml"]
)
def test_a_replaced_file_is_named(copy: Path, name: str) -> None:
    (copy / name).write_text("forged\n" * 20)
    assert name in named(copy)


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


def test_logs_may_grow_after_the_end_and_not_change(copy: Path) -> None:
    with (copy / "logs/learner-0.log").open("a") as log:
        log.write("the worker ends\n")
    assert named(copy) == {}
    (copy / "logs/learner-0.log").write_text("")
    assert "bytes" in named(copy)["logs/learner-0.log"]


def test_a_run_without_its_last_record_is_not_closed_and_what_is_proven_still_holds(copy: Path) -> None:
    cut(copy, 1)
    (copy / "run.log").write_text("run.log\n")
    result = audited(copy)
    assert (result.findings, result.is_closed) == ([], False)
    assert {"policy/model.safetensors", "tensorboard/events"} <= set(result.uncovered)
    (copy / "config.yaml").write_text(CONFIG.replace("0", "1"))
    journal = max((copy / "journal").iterdir())
    content = bytearray(journal.read_bytes())
    content[len(content) // 2] ^= 255
    journal.write_bytes(content)
    assert set(named(copy)) == {"config.yaml", f"journal/{journal.name}"}


def test_records_that_the_log_noted_are_missed_in_a_cut_and_in_a_rewritten_chain(copy: Path) -> None:
    rows = records(copy)
    cut(copy, 2)
    assert "the chain was cut" in named(copy)["run.log"]
    rows[-1]["at_s"] += 1
    rewrite(copy, rows)
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
    journal = max((tmp_path / "journal").iterdir())
    content = bytearray(journal.read_bytes())
    content[len(content) // 2] ^= 255
    journal.write_bytes(content)
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
    rewrite(copy, rows)
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
    rewrite(copy, rows)
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
    rewrite(folder, rows)
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

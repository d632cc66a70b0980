"""Findings of the preflight refuse a run or warn, and packed rows need layers that keep them apart."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from mobula.actors.processors.worker import make_processor
from mobula.cluster.errors import PreflightError
from mobula.cluster.records.media import MediaReader
from mobula.configs.load import load_config
from mobula.deploy.doctor.this_machine import Verdict, check_checkpoint, check_rows
from mobula.deploy.preflight.checks import check_packing
from mobula.deploy.preflight.weights import LoadedModel, PreflightFinding, Severity, refuse
from mobula.learner.policies.tiny import write_tiny, write_tiny_qwen2_5_vl

REFUSED = PreflightFinding("policy.model", "policy.model has no weights", "download it again")
WARNED = PreflightFinding("data.path", "data.path is slow", "copy it", Severity.WARN)


def test_findings_that_refuse_end_the_start_with_all_of_their_messages(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(PreflightError) as caught:
        refuse([WARNED, REFUSED, REFUSED])
    assert str(caught.value) == "; and ".join(["policy.model has no weights: download it again"] * 2)
    assert caplog.messages == ["data.path is slow: copy it"]


def test_warnings_let_a_run_start() -> None:
    refuse([WARNED])


def test_the_doctor_checks_a_checkpoint_that_is_here(tmp_path: Path) -> None:
    def verdicts() -> list[Verdict]:
        config = load_config(["experiment=own", f"policy.model={tmp_path / 'model'}", f"data.path={tmp_path}"])
        return [finding.verdict for finding in check_checkpoint(config)]

    assert verdicts() == [Verdict.OK], "it is not here yet"
    write_tiny_qwen2_5_vl(tmp_path / "model")
    assert verdicts() == [Verdict.OK]
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    assert verdicts() == [Verdict.MISSING]


def test_the_doctor_checks_rows_that_are_here(tmp_path: Path) -> None:
    words = ["experiment=own", f"policy.model={tmp_path / 'model'}", f"data.path={tmp_path}"]
    assert [finding.verdict for finding in check_rows(load_config(words))] == [Verdict.OK], "the model is not here yet"
    write_tiny("qwen3", tmp_path / "model")
    assert [finding.verdict for finding in check_rows(load_config(words))] == [Verdict.MISSING], "no file"
    worked = {"question": "Half of 48?", "answer": "It is 24.\nThat is all.", "level": 3}
    for split in ("train", "validation", "test"):
        (tmp_path / f"{split}.jsonl").write_text(f"{json.dumps(worked)}\n" * 3)
    rows, *references, fields = check_rows(load_config(words))
    assert (rows.verdict, rows.detail.partition(",")[0]) == (Verdict.OK, "train: 3 usable")
    assert references[0].verdict is Verdict.WARNING and references[0].detail.startswith("3 of 3 references of train")
    assert "level (" in fields.detail
    (tmp_path / "train.jsonl").write_text(json.dumps({**worked, "kto_tag": False}))
    [refused] = check_rows(load_config(words))
    assert refused.verdict is Verdict.MISSING and "`kto_tag` False" in refused.action


@pytest.mark.parametrize(
    ("name", "packing", "found"),
    [("qwen3.5", "true", 1), ("qwen3.5", "false", 0), ("qwen3.5", "auto", 0), ("qwen3", "true", 0)],
)
def test_a_model_with_a_state_takes_no_packed_rows(tmp_path: Path, name: str, packing: str, found: int) -> None:
    folder = write_tiny(name, tmp_path / "model", seed=0)
    words = ["experiment=own", f"policy.model={folder}", "data.path=none", f"learner.packing={packing}"]
    config = load_config(words)
    loaded = LoadedModel(folder, None, make_processor(config, MediaReader(timeout_s=1, max_items=1)), None)
    findings = [str(finding) for finding in check_packing(config, loaded)]
    assert len(findings) == found
    assert all("qwen3_5" in text and "set learner.packing=false" in text for text in findings)
    shared = config.learner.model_copy(update={"packing": False, "sequence_parallel": 2})
    findings = [str(found) for found in check_packing(config.model_copy(update={"learner": shared}), loaded)]
    assert [("set learner.sequence_parallel=1" in text) for text in findings] == [True] * (name == "qwen3.5")

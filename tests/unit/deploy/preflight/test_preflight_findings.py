"""Findings of the preflight refuse a run or warn, and the doctor shows them."""

import logging
from pathlib import Path

import pytest

from mobula.cluster.errors import PreflightError
from mobula.configs.load import load_config
from mobula.deploy.preflight.findings import PreflightFinding, Severity, refuse
from mobula.deploy.tools.doctor.checkpoint import check_checkpoint
from mobula.deploy.tools.doctor.this_machine import Verdict
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

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

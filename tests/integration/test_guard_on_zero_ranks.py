"""The guard on ZeRO-3 ranks that restore their shards."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import REPOSITORY, Job

from mobula.cluster.metrics.guard_events import GUARD_FILE, read_events
from mobula.cluster.metrics.report.run_folder import read_run_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

TASK = REPOSITORY / "tests" / "support" / "hackable"
GUARD = (
    "guard.max_actions=1", "checkpoints.keep=1", "metrics.progress=false", "timeouts.start_s=900",
    "learner.warmup_steps=0",
)  # fmt: skip
STOPPED = 3  # exit code
DEADLINE_S = 1800.0


def test_zero_ranks_restore_the_checkpoint_before_the_divergence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOBULA_TASKS", str(TASK))
    words = (
        "experiment=digits", "resources=laptop", "rewards=largest_digit", "learner=deepspeed", "learner.zero_stage=3",
        "num_steps=18", "guard.action=rollback", "guard.window_steps=3", "evaluation.num_prompts=16",
        "checkpoints.interval_steps=3",
    )  # fmt: skip
    with Job(tmp_path, (*words, *GUARD), small=()) as job:
        code = job.start().wait(DEADLINE_S)
        events = read_events(job.run_folder / GUARD_FILE)
        assert code in (0, STOPPED) and events, job.output
    rollback, found = events[0], read_run_folder(job.run_folder)
    assert (rollback.action, found.summary.learner_backend) == ("rollback", "deepspeed")
    assert rollback.restored is not None and rollback.restored <= rollback.agreeing < rollback.version <= 9
    judge = {step.step: step.values["guard_judge"] for step in found.steps}
    assert judge[rollback.version + 1] > judge[rollback.version] + 0.1
    assert max(step.values["logprob_gap_mean"] for step in found.steps) < 0.01, "engines have the learner's weights"

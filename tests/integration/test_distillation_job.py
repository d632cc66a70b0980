"""On-policy distillation as a whole run: vLLM samples, the reference scorer serves the teacher, the policy follows."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import Job, none_left

from mobula.cluster.metrics.report.run_folder import read_run_folder
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

NUM_STEPS = 12
WORDS = (
    "experiment=digits", "algorithm=distill", "resources=laptop_overlapped", "learner=single",
    "warm_start.num_steps=0", f"num_steps={NUM_STEPS}", "learner.learning_rate=3e-3", "learner.warmup_steps=0",
    "algorithm.prompts_per_step=8", "algorithm.samples_per_prompt=8",
)  # fmt: skip


def test_the_policy_approaches_a_teacher_whose_rewards_it_never_sees(tmp_path: Path) -> None:
    """`kl` is the divergence of the policy from the teacher on its own samples: of random weights it falls at once."""
    teacher = write_tiny_qwen2_5_vl(tmp_path / "teacher", seed=1)
    with Job(
        tmp_path, (*WORDS, f"data.path={tmp_path / 'digits'}", f"algorithm.distillation.teacher={teacher}")
    ) as job:
        job.finish(job.start())
        none_left(job.marks[0])
    found = read_run_folder(job.run_folder)
    assert found.summary is not None
    assert (found.summary.status, found.summary.version, found.faults) == ("done", NUM_STEPS, [])
    assert found.summary.logprob_gap_mean is not None and found.summary.logprob_gap_mean <= 1e-5
    kl = [step.values["kl"] for step in found.steps]
    assert sum(kl[-3:]) < 0.6 * sum(kl[:3]), kl

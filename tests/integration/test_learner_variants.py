"""The main job with another learner, by configuration alone: DeepSpeed ZeRO-3 ranks that train and push adapters."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from jobs import Job
from safetensors.numpy import load_file

from cluster.metrics.run_folder import read_run_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ADAPTED = ("qkv.weight", "proj.weight")  # how the names of weights with adapters end


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    folder = tmp_path_factory.mktemp("variants")
    words = ("experiment=digits_lora", "resources=laptop", f"data.path={folder / 'digits'}", "num_steps=2")
    learner = ("learner=deepspeed", "learner.zero_stage=3", "resources.rollout.num_workers=1")
    job = Job(folder, (*words, *learner, "weight_sync.canary_interval=1"))
    try:
        job.finish(job.start())
        yield job
    finally:
        job.end()


def test_the_run_ends_and_every_push_of_adapters_brought_the_engine_to_the_learner(job: Job) -> None:
    summary = read_run_folder(job.run_folder).summary
    assert (summary.status, summary.version) == ("done", 2)
    assert (summary.learner_backend, summary.learner_ranks) == ("deepspeed", 2)
    assert summary.weight_syncs == 3
    assert 0 < summary.canary_max <= 3e-5
    assert summary.logprob_gap_max <= 1e-3


def test_reference_and_policy_differ_from_the_base_in_adapted_weights_alone(job: Job) -> None:
    """The reference is what RL started from: the base with the adapters of the warm start."""
    files = [job.folder / "model", job.run_folder / "reference", job.run_folder / "policy"]
    base, reference, policy = (load_file(folder / "model.safetensors") for folder in files)
    assert base.keys() == reference.keys() == policy.keys()
    for before, after in ((base, reference), (reference, policy)):
        changed = {name for name in base if not np.array_equal(before[name], after[name])}
        assert changed
        assert all(name.endswith(ADAPTED) and "patch_embed" not in name for name in changed)

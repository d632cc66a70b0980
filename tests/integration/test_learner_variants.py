"""The main job with other parts, by configuration alone: DeepSpeed ZeRO-3 ranks that train and push adapters, and a
recipe of three rules and a reward that `mobula serve-rewards` answers; and the only engine is killed on the way."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from jobs import Job
from safetensors.numpy import load_file

from mobula.cluster.metrics.definitions import MetricName
from mobula.cluster.metrics.report.run_folder import read_run_folder
from mobula.cluster.metrics.sinks.jsonl import read_records
from mobula.cluster.metrics.step_records import StepRecord

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

START_S = 120.0
URLS = "rewards.components.3.options.urls"
SERVED = """
components:
  - {name: length, function: "job_reward:score", weight: 1.0, options: {}, service: reward, needs_images: false,
     retries: 0, cache_entries: 0}
accuracy_component: length
"""
# How the names of weights with adapters end: all linear layers of decoder and vision tower.
ADAPTED = ("qkv.weight", "proj.weight", "merger.mlp.0.weight", "merger.mlp.2.weight")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    folder = tmp_path_factory.mktemp("variants")
    words = ("experiment=digits_lora", "resources=laptop", f"data.path={folder / 'digits'}", "num_steps=2")
    learner = ("learner=deepspeed", "learner.zero_stage=3", "learner.ema_decay=0.5", "resources.rollout.num_workers=1")
    with Job(folder, (*words, *learner, "weight_sync.canary_interval=1")) as job:
        served = ("rewards=recipe_and_http", "rewards.recipes.default.gates=[]", f"{URLS}=[{serve(job)}/score]")
        job = replace(job, overrides=(*job.overrides, *served))
        training = job.start()
        job.reach(training, 1)
        job.kill_worker("RolloutActor")  # the only vLLM engine: on CPU its core is a thread of the actor
        job.finish(training)
        yield job


def serve(job: Job) -> str:
    """The URL of a reward server with the job's own reward; it ends with the job."""
    (job.folder / "served.yaml").write_text(SERVED)
    job.write_reward()
    server = job.start_command("serve-rewards", str(job.folder / "served.yaml"))
    found = re.compile(r"http://127\.0\.0\.1:\d+")
    job.wait(server, lambda: found.search(job.output), START_S)
    return found.search(job.output).group()


def test_an_engine_that_is_killed_is_replaced_and_gets_the_learners_adapters(job: Job) -> None:
    """It was the only one, so all that came after the kill was sampled, and evaluated, by the one in its place.

    Whether the second step's samples came before the kill or after it is not known.
    """
    found = read_run_folder(job.run_folder)
    assert len(found.faults) == found.summary.restarts == 1, found.faults
    assert found.steps[-1].counters["restarts"] == {"rollout_died": 1}
    assert re.search("rollout/0 joins with version [12] ", (job.run_folder / "run.log").read_text())


def test_the_run_ends_and_every_push_of_adapters_brought_the_engine_to_the_learner(job: Job) -> None:
    summary = job.done(2).summary
    assert (summary.learner_backend, summary.learner_ranks) == ("deepspeed", 2)
    assert summary.weight_syncs == 3
    assert 0 < summary.canary_max <= 3e-5
    assert summary.logprob_gap_max <= 1e-3


def test_three_rules_and_the_served_reward_are_combined_by_the_recipe(job: Job) -> None:
    steps = [r for r in read_records(job.run_folder / "metrics.jsonl") if isinstance(r, StepRecord)]
    for step in steps:
        parts = step.components
        assert parts.keys() == {"accuracy", "format", "overlong", "served"}
        assert parts["served"] == parts["accuracy"], "both are the same function, here and behind HTTP"
        total = parts["accuracy"] + 0.25 * parts["overlong"] + 0.5 * parts["served"]
        assert step.values[MetricName.REWARD_MEAN] == pytest.approx(total / 1.75, abs=1e-6)
    assert read_run_folder(job.run_folder).summary.rejected == {}


def test_reference_and_policy_differ_from_the_base_in_adapted_weights_alone(job: Job) -> None:
    """The reference is what RL started from: the base with the adapters of the warm start."""
    files = [job.folder / "model", job.run_folder / "reference", job.run_folder / "policy"]
    base, reference, policy = (load_file(folder / "model.safetensors") for folder in files)
    assert base.keys() == reference.keys() == policy.keys()
    for before, after in ((base, reference), (reference, policy)):
        changed = {name for name in base if not np.array_equal(before[name], after[name])}
        assert changed
        assert all(name.endswith(ADAPTED) and "patch_embed" not in name for name in changed)


def test_the_command_exports_what_the_ranks_of_deepspeed_saved(job: Job) -> None:
    for words in (["--merge"], ["--merge", "--ema"], []):
        job.finish(job.start_command("export", str(job.run_folder), "--step", "2", *words))
    folders = ("policy", "export/step-000002", "export/step-000002-ema")
    policy, merged, average = (load_file(job.run_folder / folder / "model.safetensors") for folder in folders)
    assert policy.keys() == merged.keys() == average.keys()
    assert all(np.array_equal(policy[name], merged[name]) for name in policy)
    assert any(not np.array_equal(policy[name], average[name]) for name in policy)
    adapter = load_file(job.run_folder / "export" / "step-000002-adapter" / "adapter_model.safetensors")
    assert any(np.abs(factor).max() > 0 for name, factor in adapter.items() if "lora_B" in name)

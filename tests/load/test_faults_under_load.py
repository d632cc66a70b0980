"""Rollout actors and engine cores that die or hang in the middle of long responses with two pushes behind them."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import Job, none_left
from load_model import NUM_ROWS, write_load_data, write_load_model
from sabotage import Saboteur

from mobula.cluster.metrics.report.run_folder import read_run_folder
from mobula.cluster.replay.trajectory_log import TrajectoryLog

pytestmark = [pytest.mark.load, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1800)]

SCRIPT = Path(__file__).parents[1] / "integration" / "struck_job.py"
FAULTS = ("two_pushes-actor-SIGKILL", "two_pushes-core-SIGSTOP", "two_pushes-core-SIGKILL", "two_pushes-actor-SIGSTOP")
CHUNK, SIBLINGS, STEP = 16, 4, 4
# The last deadlines are as in the defaults: an engine that waits in a push for a hung one is free before it counts as
# hung itself.
WORDS = (
    "resources=laptop_overlapped", "resources.rollout.num_workers=2", "learner=single", "data=jsonl", "policy=hf",
    "warm_start=none", "rewards.components.0.function=struck_roles:score", "algorithm.kl.coef=0",
    "algorithm.max_staleness=4", f"algorithm.samples_per_prompt={SIBLINGS}", f"algorithm.prompts_per_step={STEP}",
    "algorithm.max_concurrent_groups=16", "algorithm.drop_uniform_groups=false", "learner.learning_rate=1e-6",
    "sampler.max_tokens=250", f"sampler.chunk_tokens={CHUNK}", "sampler.vllm.max_num_seqs=16",
    "sampler.vllm.max_num_batched_tokens=64", "evaluation.num_prompts=4", "evaluation.interval_steps=0",
    "checkpoints.interval_steps=0", "replay.trajectory_log=true", "metrics.progress=false", "weight_sync.timeout_s=5",
    "supervision.probe_timeout_s=30", "timeouts.rollout_s=40", "supervision.max_restarts=100",
)  # fmt: skip


@pytest.mark.parametrize("faults", [FAULTS[:2], pytest.param(FAULTS[2:], marks=pytest.mark.exhaustive)], ids=",".join)
def test_no_prompt_and_no_reported_token_is_lost_in_the_middle_of_long_responses(
    faults: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOBULA_TEST_STEPS_PER_FAULT", "8")  # until responses have two pushes behind them
    model, data = write_load_model(tmp_path / "load", 1_000_000), write_load_data(tmp_path / "data", 20)
    where = (f"folder={tmp_path / 'runs'}", "name=job", f"policy.model={model}", f"data.path={data}")
    with Job(tmp_path, ()) as job:
        job.finish(job.start_script(str(SCRIPT), str(tmp_path), ",".join(faults), *WORDS, *where))
        none_left(job.marks[0])
    saboteur = Saboteur(tmp_path)
    assert len(saboteur.struck) == len(faults)
    found = read_run_folder(job.run_folder)
    assert found.summary.status == "done"
    assert found.summary.restarts == len(faults)
    assert found.summary.logprob_gap_max <= 1e-3
    assert max(found.summary.staleness) <= 4
    log = TrajectoryLog(job.run_folder / "trajectories", timeout_s=1.0)
    groups = [group.group for step in log.steps() for group in log.read(step)]
    places = sorted(int(e) * NUM_ROWS + int(p) for e, p, _ in (group.group_id.split("/") for group in groups))
    assert places == list(range(found.summary.num_steps * STEP))
    by_name = {group.group_id.replace("/", "-"): group for group in groups}
    left = saboteur.left()
    assert len(left) == len(faults)
    for name, reported in left.items():
        for trajectory, tokens in zip(by_name[name].trajectories, reported, strict=True):
            assert trajectory.actions.token_ids[: len(tokens)].tolist() == tokens
    resumed = found.steps[-1].counters["resumed"]
    assert resumed["tokens_kept"] >= sum(len(tokens) for reported in left.values() for tokens in reported)
    assert resumed["tokens_lost_at_most"] <= resumed["prompts"] * SIBLINGS * (CHUNK - 1)

"""The batch script in a real Slurm of two nodes: a run on both, TERM before the time limit, requeue, and the rest."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from jobs import REPOSITORY, REWARD, SMALL
from slurm import reason_against, two_node_slurm
from waiting import wait_until

from mobula.cluster.metrics.report.run_folder import read_run_folder
from mobula.configs.overrides import overridden

WHY_NOT = reason_against()
SCRIPT = REPOSITORY / "deploy" / "slurm" / "mobula.sbatch"
RUN_S = 900.0
NUM_STEPS = 40
without_slurm = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
pytestmark = [pytest.mark.matrix, pytest.mark.timeout(2400), without_slurm]


def num_steps(folder: Path) -> int:
    path = folder / "runs" / "job" / "metrics.jsonl"
    return path.read_text().count('"kind": "step"') if path.is_file() else 0


def test_a_job_on_two_nodes_is_stopped_in_order_queued_again_and_finished(tmp_path: Path) -> None:
    (tmp_path / "job_reward.py").write_text(REWARD)
    words = overridden(
        SMALL,
        [
            "experiment=digits", "name=job", f"num_steps={NUM_STEPS}", "resources.rollout.strategy=spread",
            f"rewards.components.0.function={tmp_path / 'job_reward.py'}:score", f"folder={tmp_path / 'runs'}",
            f"data.path={tmp_path / 'digits'}", f"policy.model={tmp_path / 'model'}",
        ],
    )  # fmt: skip
    env = {"MOBULA_ENV": str(Path(sys.executable).parents[1]), "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    with two_node_slurm(tmp_path) as slurm:
        job = slurm.submit(SCRIPT, *words, options=("--nodes=2", f"--output={tmp_path}/job.log"), **env)

        def said() -> str:
            return f"{slurm.state(job)}: {slurm.logs()}"

        wait_until(lambda: num_steps(tmp_path) >= 2 or slurm.is_over(job), RUN_S, said)
        assert not slurm.is_over(job), said()
        placed = json.loads((tmp_path / "runs" / "job" / "plan.json").read_text())
        assert len({row["node_id"] for row in placed if row["role"] == "rollout"}) == 2, "an engine on each node"
        slurm.run("scancel", "--batch", "--signal=TERM", str(job))
        wait_until(lambda: (tmp_path / "runs/job/summary.json").is_file(), RUN_S, said)
        reached = num_steps(tmp_path)
        assert 2 <= reached < NUM_STEPS
        wait_until(lambda: slurm.is_over(job), RUN_S, said)
        assert slurm.state(job) == "COMPLETED", said()
    run = read_run_folder(tmp_path / "runs" / "job")
    assert (run.summary.status, run.summary.num_steps) == ("done", NUM_STEPS)
    assert [step.step for step in run.steps] == list(range(1, NUM_STEPS + 1))

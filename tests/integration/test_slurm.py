"""The batch script in a real Slurm of two nodes: a run on both, TERM before the time limit, requeue, and the rest."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from jobs import REPOSITORY, REWARD, SMALL, steps_of
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


def test_a_job_on_two_nodes_is_stopped_in_order_queued_again_and_finished(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "job"
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

        wait_until(lambda: len(steps_of(folder)) >= 2 or slurm.is_over(job), RUN_S, said)
        assert not slurm.is_over(job), said()
        placed = json.loads((folder / "plan.json").read_text())
        assert len({row["node_id"] for row in placed if row["role"] == "rollout"}) == 2, "an engine on each node"
        slurm.run("scancel", "--batch", "--signal=TERM", str(job))
        wait_until(lambda: (folder / "summary.json").is_file(), RUN_S, said)
        assert 2 <= len(steps_of(folder)) < NUM_STEPS
        wait_until(lambda: slurm.is_over(job), RUN_S, said)
        assert slurm.state(job) == "COMPLETED", said()
    run = read_run_folder(folder)
    assert (run.summary.status, run.summary.num_steps) == ("done", NUM_STEPS)
    assert [step.step for step in run.steps] == list(range(1, NUM_STEPS + 1))

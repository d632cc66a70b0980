"""Real vLLM engines whose cores are processes of their own, as on GPUs: whatever happens to a core, at whichever
moment, the run trains what it would have trained."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from audited import audited
from jobs import PROMPTS_PER_STEP, Job, none_left
from sabotage import Saboteur
from test_faults import KINDS, MOMENTS

from mobula.cluster.metrics.report.run_folder import read_run_folder
from mobula.cluster.replay.trajectory_log import TrajectoryLog

pytestmark = [pytest.mark.matrix, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1800)]

DEADLINE_S = 1500.0  # six engines start again, one after the other
SCRIPT = Path(__file__).with_name("struck_job.py")
# A healthy engine reports a broken transfer group after weight_sync.timeout_s and is lost after 1.25 times that: the
# difference must be more than a loaded machine delays a reply.
WORDS = (
    "experiment=digits", "resources=laptop", "algorithm.max_staleness=0",
    "rewards.components.0.function=struck_roles:score", "replay.trajectory_log=true", "checkpoints.interval_steps=1",
    "timeouts.rollout_s=24", "weight_sync.timeout_s=16", "supervision.probe_timeout_s=24",
    "supervision.max_restarts=100",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=["kill", "hang", "slow"])
def test_whatever_happens_to_an_engines_core_costs_nothing_but_time(kind: signal.Signals, tmp_path: Path) -> None:
    job = Job(tmp_path, (*WORDS, f"data.path={tmp_path / 'digits'}"))
    faults = ",".join(f"{moment}-core-{kind.name}" for moment in MOMENTS)
    with job:
        job.finish(job.start(str(SCRIPT), str(tmp_path), faults), DEADLINE_S)
        none_left(job.marks[0])
    assert Saboteur(tmp_path).struck == [f"{moment} core {int(kind)}" for moment in MOMENTS]
    found = read_run_folder(job.run_folder).summary
    assert found.status == "done"
    assert found.restarts == (0 if kind is signal.SIGCONT else len(MOMENTS))
    audit = audited(job.run_folder)
    assert audit.findings == []
    assert len(audit.history.parts[0].losses) == found.restarts
    log = TrajectoryLog(job.run_folder / "trajectories", timeout_s=1.0)
    assert log.steps() == list(range(1, found.num_steps + 1))
    trained = [sorted(_place(group.group.group_id) for group in log.read(step)) for step in log.steps()]
    places = list(range(found.num_steps * PROMPTS_PER_STEP))
    assert trained == [places[i : i + PROMPTS_PER_STEP] for i in range(0, len(places), PROMPTS_PER_STEP)]


def _place(group_id: str) -> int:
    """Of its prompt in the first epoch."""
    epoch, place, _ = group_id.split("/", maxsplit=2)
    assert epoch == "0"
    return int(place)

"""Whether the run finished steps, and why it ended."""

from __future__ import annotations

from mobula.cluster.metrics.report.findings import Evidence, RunFinding, RunVerdict
from mobula.cluster.metrics.report.run_folder import RunFolder
from mobula.deploy.tools.diagnose.records.material import Material
from mobula.deploy.tools.diagnose.records.registry import not_measured

NAME = "finished_steps"
NUM_SHOWN = 3
ACTION = "read the end of run.log and the logs of the workers in logs/; `mobula train resume=auto` continues the run"
NO_STEP = (
    "no group was trained: see the reasons, the end of run.log, and rewards.on_failure for responses without a score"
)


def check_progress(material: Material) -> RunFinding:
    """Finished steps of the planned ones, and the state in which the run ended."""
    run = material.run
    if run is None:
        return not_measured(NAME, "there is no run yet")
    finished, planned = len(run.steps), material.config.num_steps
    status = run.summary.status if run.summary else "not ended"
    numbers = {"finished": float(finished), "planned": float(planned)}
    measured = f"{finished} of {planned} steps are finished; status: {status}"
    if run.summary is None or status == "done" and finished:
        return RunFinding(NAME, RunVerdict.OK if finished else RunVerdict.NOTICE, measured, numbers)
    if run.summary.error:
        measured += f"; it ended with {run.summary.error}"
    verdict = RunVerdict.NOTICE if status == "stopped" else RunVerdict.WARNING if finished else RunVerdict.FAULT
    return RunFinding(NAME, verdict, measured, numbers, ACTION if finished else NO_STEP, tuple(_reasons(run)))


def _reasons(run: RunFolder) -> list[Evidence]:
    rejected = run.summary.rejected if run.summary else {}
    groups = [Evidence(f"{count} groups were rejected: {reason}") for reason, count in rejected.items()]
    return [*groups, *(Evidence(f"{fault.worker}: {fault.cause}") for fault in run.faults[-NUM_SHOWN:])]

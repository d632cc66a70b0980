"""WandbSink: Weights & Biases, offline below the run folder or on a server."""

from __future__ import annotations

import wandb

from cluster.metrics.sinks.scalars import evaluation_scalars, step_scalars
from cluster.metrics.sinks.trackers import TrackedRun
from cluster.metrics.step_records import EvaluationRecord, StepRecord

STEP = "trained_step"


class WandbSink:
    """Without an address nothing leaves the machine: `wandb sync` sends the folder later. The key of a server is read
    from WANDB_API_KEY or ~/.netrc. The axis of every chart is the step, as evaluations end behind later steps.
    """

    name = "wandb"

    def __init__(self, run: TrackedRun) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        server = {"base_url": run.address} if run.address else {}
        settings = wandb.Settings(console="off", disable_code=True, disable_git=True, silent=True, **server)
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.name,
            dir=run.folder,
            config=dict(run.config),
            mode="online" if run.address else "offline",
            resume="allow" if run.address else None,
            settings=settings,
        )
        self._run.define_metric("*", step_metric=STEP)

    def emit(self, record: StepRecord) -> None:
        self._run.log({STEP: record.step, **step_scalars(record)})

    def emit_evaluation(self, record: EvaluationRecord) -> None:
        self._run.log({STEP: record.version, **evaluation_scalars(record)})

    def close(self) -> None:
        self._run.finish()

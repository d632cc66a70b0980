"""WandbSink: logs to Weights & Biases, offline below the run folder or on a server."""

from __future__ import annotations

import os
from collections.abc import Sequence

import wandb

from mobula.cluster.metrics.sinks.base import COLUMNS, TABLE, cells, evaluation_scalars, images, step_scalars
from mobula.cluster.metrics.sinks.trackers import TrackedRun
from mobula.cluster.metrics.step_records import EvaluationRecord, SampleRecord, StepRecord

STEP = "trained_step"
STAGED = "wandb/data"  # tables with images before they are sent


class WandbSink:
    """Logs offline without an address: `wandb sync` sends the folder later. WANDB_API_KEY or ~/.netrc has the key of a
    server. The axis of every chart is the step, because an evaluation may end after later steps.
    """

    name = "wandb"

    def __init__(self, run: TrackedRun) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("WANDB_DATA_DIR", str((run.folder / STAGED).absolute()))  # the default is the home folder
        server = {"base_url": run.address} if run.address else {}
        settings = wandb.Settings(console="off", disable_code=True, disable_git=True, silent=True, **server)
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.run_id,
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

    def emit_samples(self, samples: Sequence[SampleRecord]) -> None:
        """Logs a table of the step's responses, each with its first image, and all images by kind of response."""
        shown = {s.kind: [wandb.Image(image, caption=s.response) for image in images(s)] for s in samples}
        rows = [[*cells(sample), next(iter(shown[sample.kind]), None)] for sample in samples]
        table = wandb.Table(columns=[*COLUMNS, "image"], data=rows)
        by_kind = {f"{TABLE}_{kind}": panel for kind, panel in shown.items() if panel}
        self._run.log({STEP: samples[0].step, TABLE: table, **by_kind})

    def close(self) -> None:
        self._run.finish()
